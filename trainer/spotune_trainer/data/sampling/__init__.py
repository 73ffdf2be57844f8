"""How many samples of which source a step has. Pure arithmetic, without NumPy."""
