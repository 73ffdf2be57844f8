"""The runtime of the operator: work queue, health server, metrics, JSON logs."""
