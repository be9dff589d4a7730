"""The engine: images in, answers and audit lines out; one state per stream."""
