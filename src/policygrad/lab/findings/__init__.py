"""The field's claims, one small function each: `(seed) -> Finding`."""
