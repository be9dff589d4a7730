"""The choice of a method for a pool, on its own sites as pseudo-targets."""
