"""A folder in place of HTTP: files put into it are answered in batches."""
