"""Worker processes that run reward functions."""
