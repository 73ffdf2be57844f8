"""Tests of the reconciling of ModelServices."""
