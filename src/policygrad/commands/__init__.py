"""The subcommands, one file each, imported when run."""

COMMANDS = {  # module:function
    "train": "policygrad.commands.train:train",
    "sft": "policygrad.commands.supervised:sft",
    "reward-model": "policygrad.commands.supervised:reward_model",
    "eval": "policygrad.commands.evaluate:evaluate",
    "serve": "policygrad.commands.serve:serve",
    "chat": "policygrad.commands.chat:chat",
    "proxy": "policygrad.commands.proxy:proxy",
    "engine": "policygrad.commands.engine:engine",
    "export": "policygrad.commands.export:export",
    "compare": "policygrad.commands.compare:compare",
    "init": "policygrad.commands.init:init",
    "convert": "policygrad.commands.convert:convert",
    "plan": "policygrad.commands.plan:plan",
    "doctor": "policygrad.commands.doctor:doctor",
    "verify": "policygrad.commands.verify:verify",
    "runs": "policygrad.commands.runs:runs",
    "report": "policygrad.commands.report:report",
    "audit": "policygrad.commands.audit:audit",
    "algorithms": "policygrad.commands.show:algorithms",
    "show": "policygrad.commands.show:show",
    "lab": "policygrad.commands.lab:lab",
    "skills": "policygrad.commands.skills:skills",
    "completion": "policygrad.commands.completion:completion",
}

STOPPED = 75
"""Exit code of a run that was stopped by a signal or a time limit and can be resumed (EX_TEMPFAIL in sysexits.h)."""
