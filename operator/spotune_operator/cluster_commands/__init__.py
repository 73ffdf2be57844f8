"""The commands of `spotune` that look at a cluster: as the user of a kubeconfig, from outside, without the operator."""
