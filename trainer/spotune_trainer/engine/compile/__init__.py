"""torch.compile of a model's layers, two graph passes for it, and its cache on the job's volume."""
