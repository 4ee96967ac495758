"""Numbers and their formats: overflow statistics, float32 islands, precision plugins."""
