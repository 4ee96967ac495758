"""How waits in the backend are ended, so that the error reaches the program."""
