"""The subcommands: from words to a configuration, and from results to words. One file each, imported when it is run."""
