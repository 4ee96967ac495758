"""What the checks may ask: of this machine, or of an imitated one."""
