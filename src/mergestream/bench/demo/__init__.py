"""The demo: the whole story on the phantom hospitals."""
