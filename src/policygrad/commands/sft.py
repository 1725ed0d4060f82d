"""`policygrad sft`: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from policygrad.commands.supervised import command
from policygrad.training.config.supervised import SFTConfig

HELP = (
    "Fine-tune a causal language model on demonstrations: a .jsonl file whose lines have `prompt` and `completion`, or "
    "`messages` of a chat, of which the assistant's turns are learnt.",
)


def sft(args: list[str]) -> int:
    """`policygrad sft --data FILE [options]`."""
    return command(SFTConfig, args, HELP, "policygrad.training.sft:sft")
