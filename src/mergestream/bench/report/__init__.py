"""Findings in; tables, figures and pages out. Nothing is computed here."""
