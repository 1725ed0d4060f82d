"""Checks of a finished or stopped run: its files against each other, and single steps repeated and compared."""
