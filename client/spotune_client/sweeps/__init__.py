"""Sweeps: their trials, and the page that compares these."""
