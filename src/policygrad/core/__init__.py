"""The equation and its parts: torch and the standard library only, importable in any training loop."""
