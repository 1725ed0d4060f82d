"""Samplers: token ids in; token ids with log-probabilities and weight versions out. An engine is one file."""
