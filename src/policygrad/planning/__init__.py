"""Capacity planning before a run: memory, seconds and cost, by arithmetic on shapes and published figures, without torch."""
