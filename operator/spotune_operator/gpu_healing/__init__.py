"""Heals nodes that have lost GPUs: the policy (pure) and the healer that executes it."""
