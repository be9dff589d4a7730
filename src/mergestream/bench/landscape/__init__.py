"""The loss over the plane through three experts."""
