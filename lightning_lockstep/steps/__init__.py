"""One training step run alone on one rank."""
