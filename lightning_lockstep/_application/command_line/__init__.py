"""Everything that can be wrong with a command line, found before any rank starts, and its help."""
