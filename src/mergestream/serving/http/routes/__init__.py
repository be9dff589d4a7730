"""The service's addresses: one file for each thing they are about."""
