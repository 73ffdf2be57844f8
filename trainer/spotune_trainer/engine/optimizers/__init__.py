"""Optimizers by name (`training.optimizer`), stepped on DeepSpeed's master tensors."""
