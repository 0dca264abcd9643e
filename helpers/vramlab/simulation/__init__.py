"""`simulate`: the real training step on fake tensors. No GPU, no memory."""
