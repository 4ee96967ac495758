"""Compares what the ranks call before each collective: seen in torch's dispatcher, compared over a small gloo group."""
