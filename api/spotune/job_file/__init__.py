"""Reads files of custom resources: YAML with line numbers, validation, and clear error messages."""
