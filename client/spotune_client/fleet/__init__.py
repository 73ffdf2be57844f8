"""All jobs of a cluster by team: GPU hours, cost, goodput and waste."""
