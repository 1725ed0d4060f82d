"""What draws completions: token ids in, token ids with their log-probabilities and versions out. An engine is one file."""
