"""Evaluation: the loss on held-out samples, and metrics of generated answers."""
