"""Rows with labels, for classifiers: of texts, or of each of their words."""
