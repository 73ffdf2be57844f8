"""The HTTP API in front of the replicas: tokenization, streams, keys, limits and metrics."""
