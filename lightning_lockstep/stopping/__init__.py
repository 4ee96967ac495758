"""When all ranks stop together."""
