"""The plan of a job for each number of workers: layout, memory, time of a step, and checkpoints."""
