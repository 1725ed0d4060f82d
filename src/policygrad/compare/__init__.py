"""Algorithms against each other: every run an ordinary `policygrad train`, and what can be said of their curves."""
