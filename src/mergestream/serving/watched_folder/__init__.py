"""A watched folder, for sites without HTTP: files put into it are answered in batches."""
