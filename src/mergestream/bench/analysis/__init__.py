"""Records in, findings out."""
