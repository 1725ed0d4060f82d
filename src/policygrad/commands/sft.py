"""`policygrad sft`: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from policygrad.commands.supervised import dry_run, parse
from policygrad.training.supervised_config import SFTConfig

HELP = (
    "Fine-tune a causal language model on demonstrations: a .jsonl file whose lines have `prompt` and `completion`, or "
    "`messages` of a chat, of which the assistant's turns are learnt.",
)


def sft(args: list[str]) -> int:
    """`policygrad sft --data FILE [options]`."""
    config, command = parse(SFTConfig, args, HELP)
    if command.dry_run:
        print(dry_run(config))
        return 0
    from policygrad.track import make_display
    from policygrad.training.sft import sft as start

    start(
        config, resume=command.resume, stop_after=command.stop_after, display=make_display(plain=command.plain or None)
    )
    return 0
