"""Checkpoints of a job whose storage is a bucket."""
