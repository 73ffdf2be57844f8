"""Tensors in 4 and 8 bits: frozen weights, and the moments of an optimizer."""
