"""A process of rank 1 and above: it does what rank 0 says, and nothing else."""

from __future__ import annotations

import os
import signal
import traceback
from contextlib import suppress

import torch

from policygrad.learners.fsdp.leader import AGREED
from policygrad.learners.fsdp.learner import FsdpLearner, Plan
from policygrad.learners.fsdp.ranks import Ranks


def main(port: int, rank: int, size: int) -> None:
    """Of a process that rank 0 has started, which listens at this port of the machine. It does not return."""
    code = 1
    try:
        code = follow(Ranks.at(port, rank, size))
    except BaseException:  # at once, so that nobody waits for what this one holds
        traceback.print_exc()
    os._exit(code)


def follow(ranks: Ranks) -> int:
    """Until rank 0 says that it is over, 0; or is gone, 1, in which case it has said why. Signals are rank 0's: those of a terminal
    and of torchrun come to all."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    learner: FsdpLearner | None = None
    while True:
        try:
            said = ranks.heard()
        except RuntimeError:
            return 1
        if said is None:
            ranks.close()
            return 0
        with suppress(*AGREED):  # which rank 0 raises too
            if isinstance(said, Plan):
                torch.set_num_threads(said.threads)
                learner = FsdpLearner(ranks, said)
            else:
                method, args = said
                getattr(learner, method)(*args)
