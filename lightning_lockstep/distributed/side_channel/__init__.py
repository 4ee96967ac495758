"""Messages between ranks that need no collective."""
