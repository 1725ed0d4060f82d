"""A run's configuration: data that the command line, a TOML file and Python write alike."""
