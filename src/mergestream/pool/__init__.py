"""Experts on disk and in memory, and how their networks run."""
