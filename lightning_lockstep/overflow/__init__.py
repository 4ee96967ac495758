"""Finding the module, rank and batch of a nan or infinity."""
