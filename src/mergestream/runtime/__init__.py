"""Errors, files, processes, seeding and option checks: what every other room uses."""
