"""The project's own code."""
