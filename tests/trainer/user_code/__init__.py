"""Code of the user that is read before workers start."""
