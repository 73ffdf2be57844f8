"""Curves of a run: TensorBoard in the driver; Weights & Biases and MLflow from a thread."""
