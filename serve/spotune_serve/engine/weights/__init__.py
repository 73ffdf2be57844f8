"""Weights on a device: copied there through page-locked buffers, and shared by the replicas of one GPU."""
