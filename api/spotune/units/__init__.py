"""Field types for numbers with units: durations, deadlines, money and Kubernetes quantities."""
