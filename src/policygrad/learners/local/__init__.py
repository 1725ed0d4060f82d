"""The learner in one process: packing, one forward pass, gradients, curvature, a value model."""
