"""Targets × methods × streams × seeds × options: every run once, resumable, on one machine or many."""
