"""Programs that the doctor starts to ask what it does not import itself; each prints a JSON object."""
