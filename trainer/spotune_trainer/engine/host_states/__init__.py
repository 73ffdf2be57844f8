"""Optimizer states in host memory, which the device updates."""
