"""Mixtures of several sources of training data."""
