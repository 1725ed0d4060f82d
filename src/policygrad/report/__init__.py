"""Finished and running trainings as one HTML page. It reads what a run's folder holds; nothing else reads it."""
