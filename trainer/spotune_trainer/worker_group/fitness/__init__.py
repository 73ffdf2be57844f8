"""Whether nodes are fit for training: measurements on the nodes, and the driver's judgement of them."""
