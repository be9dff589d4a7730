"""Statistics of an expert on its site's images: Gram matrices of inputs and Fisher information."""
