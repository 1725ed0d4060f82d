"""The lab: small problems whose true gradient is known, to measure what an estimator does. On core and algorithms alone.

Everything is float64. The estimators are the library's own: an `Algorithm`'s advantages, coefficients and surrogate.
"""
