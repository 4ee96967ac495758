"""How a rank fails, how the others learn of it, and how a process ends."""
