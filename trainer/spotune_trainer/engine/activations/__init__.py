"""What a layer keeps for the backward pass: which layers are computed again, and what waits in host memory."""
