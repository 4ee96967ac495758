"""How ranks are started, and what the process that started them does when one ends."""
