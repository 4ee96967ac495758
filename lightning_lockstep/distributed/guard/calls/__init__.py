"""What each rank has called: torch's records and ours, brought into one form and compared."""
