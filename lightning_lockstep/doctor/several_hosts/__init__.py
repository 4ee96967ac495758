"""The doctor on several hosts, by ssh or as ranks, in one table."""
