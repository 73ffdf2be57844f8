"""Which pool of nodes carries which worker: a pure function of the pods, the prices and what was refused before."""
