"""Reconciles ModelServices: a trained model behind an endpoint, by a RayService of KubeRay."""
