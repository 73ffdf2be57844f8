"""The versions of the model behind one gateway: which one answers a request, and how each one does."""
