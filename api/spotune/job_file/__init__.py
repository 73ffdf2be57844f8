"""Reads files of FinetuneJobs and ModelServices: YAML with line numbers, validation, and clear error messages."""
