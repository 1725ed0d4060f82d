"""How weights get from a learner to a sampler."""
