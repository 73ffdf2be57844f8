"""Snapshots of commits in shared memory of nodes, from which the next worker group restores (docs/adr/0052, 0059)."""
