"""Checkpoints: per-parameter fragments that any world size and any ZeRO stage can read."""
