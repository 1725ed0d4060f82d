"""Rewards: functions by name, and the pool of killable worker processes that runs them."""
