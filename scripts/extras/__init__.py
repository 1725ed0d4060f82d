"""What scripts/check_extras.py checks of every extra, and the servers that stand in for others' while it does."""
