"""Exchange of experts through a pool on disk: list, add, replace, restore, verify."""
