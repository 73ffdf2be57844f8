"""Access to the Kubernetes API: client, reflector, merge patches, conditions, timestamps."""
