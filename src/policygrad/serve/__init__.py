"""A training server that speaks the Tinker API."""
