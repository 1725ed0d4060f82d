"""The subcommands: from words to a configuration, and from results to words. One file each, imported when it is run."""

COMMANDS = {  # the function of each, as module:name
    "train": "policygrad.commands.train:train",
    "sft": "policygrad.commands.supervised:sft",
    "reward-model": "policygrad.commands.supervised:reward_model",
    "eval": "policygrad.commands.evaluate:evaluate",
    "engine": "policygrad.commands.engine:engine",
    "export": "policygrad.commands.export:export",
    "compare": "policygrad.commands.compare:compare",
    "plan": "policygrad.commands.plan:plan",
    "report": "policygrad.commands.report:report",
    "algorithms": "policygrad.commands.show:algorithms",
    "show": "policygrad.commands.show:show",
    "lab": "policygrad.commands.lab:lab",
    "completion": "policygrad.commands.completion:completion",
}

STOPPED = 75
"""The exit code of what was stopped by a signal or a time limit and can be gone on with; sysexits.h calls it EX_TEMPFAIL."""
