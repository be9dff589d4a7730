"""How far apart experts are, layer by layer."""
