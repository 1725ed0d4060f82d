"""A package of somebody else's: everything that it adds to policygrad is found by its entry points."""
