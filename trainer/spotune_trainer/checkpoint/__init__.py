"""Checkpoints: fragments that any world size and ZeRO stage can read, committed beside training."""
