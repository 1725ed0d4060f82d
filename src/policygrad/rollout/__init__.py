"""From examples to a batch: run episodes of any length, score them and pad them."""
