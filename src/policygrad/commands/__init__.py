"""The subcommands: from words to a configuration, and from results to words. One file each, imported when it is run."""

COMMANDS = {  # the function of each, as module:name
    "train": "policygrad.commands.train:train",
    "eval": "policygrad.commands.evaluate:evaluate",
    "algorithms": "policygrad.commands.show:algorithms",
    "show": "policygrad.commands.show:show",
    "completion": "policygrad.commands.completion:completion",
}
