"""Who gets which sample, and what it counts: one order on any number of ranks, each sample once."""
