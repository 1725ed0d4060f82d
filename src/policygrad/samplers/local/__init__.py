"""The sampler in this process."""
