"""Claims from the literature, one function each: `(seed) -> MeasuredClaim`. Docstrings are the descriptions in `policygrad lab`."""
