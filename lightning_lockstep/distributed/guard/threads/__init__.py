"""What the threads of this process do, seen from another thread."""
