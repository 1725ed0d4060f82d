"""Engines: servers that sample, each one file beside the base that they share."""
