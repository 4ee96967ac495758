"""Batches of the same shapes: the last one dropped or padded, sequences padded to a few lengths."""
