"""The largest batch that fits, and a run that survives a larger one."""
