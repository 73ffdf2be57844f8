"""Snapshots of commits in shared memory of a node, from which the next worker group restores (docs/adr/0052)."""
