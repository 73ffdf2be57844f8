"""The `spotune` commands for a cluster. They act as the user of a kubeconfig and do not need the operator to be up."""
