"""When a worker group leaves for a smaller or larger one: pure functions of measured times, and what they measure."""
