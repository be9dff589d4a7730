"""Errors, files, processes, seeding and option checks: used by every other package."""
