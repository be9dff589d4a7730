"""Claims of the paper, checked against runs and pools."""
