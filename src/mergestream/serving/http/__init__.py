"""The HTTP interface: application, routes, authentication and limits."""
