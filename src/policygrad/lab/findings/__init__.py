"""Claims from the literature, one function each: `(seed) -> Finding`. Their docstrings are the descriptions in `policygrad lab`."""
