"""Pod templates of any kind of pod: three layers that are merged, and what all Ray pods have in common."""
