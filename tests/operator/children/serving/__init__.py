"""Tests of the children of a ModelService."""
