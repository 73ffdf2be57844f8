"""Training objectives: what a step minimizes."""
