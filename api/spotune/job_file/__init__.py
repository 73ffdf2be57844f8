"""Reads job files: YAML with line numbers, validation, and error messages that name file, line and field."""
