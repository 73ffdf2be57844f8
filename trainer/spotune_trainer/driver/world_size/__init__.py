"""How many workers a group has: what it starts with, and whether it should leave for another size."""
