"""What becomes of raw rows: how many are trained on, and how many are left out, by reason."""
