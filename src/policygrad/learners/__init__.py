"""What owns the weights: evaluates a batch, updates on it, publishes."""
