"""Training: the learner, the loop, checkpoints, and a run's configuration."""
