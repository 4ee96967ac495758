"""Tensors whose shapes differ between the ranks, gathered."""
