"""Shared frame of all HTML pages, one file with its style, scripts and data; charts as SVG, and the files of `--export`."""
