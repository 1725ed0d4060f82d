"""A comparison as one HTML page with interactive plots. It reads the report; nothing else reads it."""
