"""Predicts the time of an optimizer step on a GPU, and what follows from it: tokens per second and MFU."""
