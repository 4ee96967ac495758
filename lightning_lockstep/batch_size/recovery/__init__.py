"""A batch that does not fit in mid-run."""
