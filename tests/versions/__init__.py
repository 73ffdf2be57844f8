"""Runs the tests with other versions of Python, Ray, Kubernetes and KubeRay: `python -m tests.versions --help`."""
