"""Tests of the optimizers that step DeepSpeed's masters."""
