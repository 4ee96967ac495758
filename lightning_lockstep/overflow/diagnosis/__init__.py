"""Which module made the first bad value: the batch replayed with its frames recorded."""
