"""Spot or on-demand under a deadline: a pure policy, the history of spot markets, and a simulation of both."""
