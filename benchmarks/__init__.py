"""Benchmarks: ``python -m benchmarks <topic>``; see README.md in this folder."""
