"""The doctor: checks of a machine before a run, each with its evidence and the command that fixes what it found."""
