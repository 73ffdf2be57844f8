"""The preflight: checks of storage, model and data on the head, before a job holds any GPU."""
