"""The documentation pages that are computed from the algorithms themselves."""
