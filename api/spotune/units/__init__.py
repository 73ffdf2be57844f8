"""Field types for numbers with units: durations and Kubernetes quantities."""
