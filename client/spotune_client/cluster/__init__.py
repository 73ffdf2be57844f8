"""Access to a cluster as the user of a kubeconfig: API client, port-forward, and a pod that reads a job's volume."""
