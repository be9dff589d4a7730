"""Findings as tables, figures and pages. Nothing is measured here."""
