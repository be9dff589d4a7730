"""Evaluation, records, analysis and reports."""
