"""Commands of the user, such as torchrun, that train in place of spotune's training loop."""
