"""Ranks that a notebook starts: what is checked before, how their output and errors reach the cell."""
