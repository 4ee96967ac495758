"""The checks, each in a file of its name."""
