"""Serves finished models with Ray Serve: OpenAI's API, continuous batching, and streams that survive their replica."""
