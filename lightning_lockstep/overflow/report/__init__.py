"""What all ranks have found: put together, printed, written to files, acted on."""
