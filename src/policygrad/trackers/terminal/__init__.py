"""The live display on a terminal; the one room of trackers that needs rich."""
