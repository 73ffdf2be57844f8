"""Worker groups: an agent on each node that forks the ranks, and the driver's side that places them and waits."""
