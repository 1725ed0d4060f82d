"""What outlives a process: atomic, verified, as safetensors and JSON."""
