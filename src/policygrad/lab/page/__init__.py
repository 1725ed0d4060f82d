"""The lab's report as one HTML page with interactive plots. It reads the report; nothing of the lab reads it."""
