"""Training functions of the user (`training.function`), which use Ray Train, with the promises of every other job."""
