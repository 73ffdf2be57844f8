"""The supervisor: submits drivers to Ray, watches them, and submits again until the model is trained."""
