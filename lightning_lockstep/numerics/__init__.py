"""Numbers and their formats: statistics, checks of gradients, float32 modules, precision plugins."""
