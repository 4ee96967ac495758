"""Drivers, toolkits and compilers, and the torch that they are for."""
