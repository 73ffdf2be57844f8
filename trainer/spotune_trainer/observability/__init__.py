"""What a run reports about itself: progress, hangs, goodput, curves, logs and the report page."""
