"""One callback a file: it says when and syncs; what to decide stands in a pure class beside it."""
