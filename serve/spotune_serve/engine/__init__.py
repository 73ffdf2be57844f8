"""Generates tokens: the engine protocol, and continuous batching on transformers."""
