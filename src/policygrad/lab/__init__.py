"""The lab: small problems whose true gradient is known, to measure estimators exactly. It depends on core and algorithms only.

Everything is float64. The estimators are the library's own: an `Algorithm`'s advantages, coefficients and surrogate.
"""
