"""Limits of a job that its spec sets: the deadline, and the cost."""
