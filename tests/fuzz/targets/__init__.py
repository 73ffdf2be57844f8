"""The parsers, one module for each of those who write what they read."""
