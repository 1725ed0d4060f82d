"""The learner in one process: trees of texts, one forward pass, gradients, curvature, a value model."""
