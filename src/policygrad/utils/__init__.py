"""Small tools that every room may use: files, signals, event loops, user code."""
