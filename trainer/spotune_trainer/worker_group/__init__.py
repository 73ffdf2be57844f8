"""worker_group."""
