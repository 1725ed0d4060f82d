"""What every HTML page is made in: one file, its style, scripts and data inside it."""
