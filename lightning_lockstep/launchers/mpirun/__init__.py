"""Ranks that are started with mpirun."""
