"""Collectives answered on this rank alone, for a step run apart from the run."""
