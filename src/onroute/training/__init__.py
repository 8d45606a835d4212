"""The training step: log-prob passes, the loss, the optimizer, its checkpoint."""
