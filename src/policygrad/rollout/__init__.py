"""From examples to a batch: episodes of any length are played, judged and stacked."""
