"""A process of rank 1 and above: it does what rank 0 says, and nothing else."""

from __future__ import annotations

import os
import signal
import traceback
from contextlib import suppress

from policygrad.learners.fsdp.controller import AGREED, lost_connection
from policygrad.learners.fsdp.learner import FsdpLearner, Plan
from policygrad.learners.fsdp.processes import Ranks, end_with_rank_0
from policygrad.learners.fsdp.watchdog import Heart
from policygrad.utils.signals import SIGNALS


def main(port: int, rank: int, size: int) -> None:
    """Of a process that rank 0 has started, which listens at this port of the machine. It does not return."""
    code = 1
    end_with_rank_0()
    try:
        code = follow(Ranks.at(port, rank, size))
    except BaseException:  # at once, so that nobody waits for what this one holds
        traceback.print_exc()
    os._exit(code)


def joined() -> int:
    """Of one of torchrun's processes above rank 0: its exit code."""
    return follow(Ranks.joined())


def follow(ranks: Ranks) -> int:
    """Until rank 0 says that it is over, 0; or another process has gone, 1, which has said why. Signals are rank 0's: those of a
    terminal and of torchrun come to all."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    learner: FsdpLearner | None = None
    heart = Heart(ranks.line, ranks.rank)
    try:
        while (said := ranks.heard()) is not None:
            with suppress(*AGREED):  # which rank 0 raises too
                if isinstance(said, Plan):
                    learner = FsdpLearner(ranks, said)
                else:
                    function, args = said
                    function(learner, *args)
    except RuntimeError as error:
        if not lost_connection(error):
            raise
        return 1
    heart.close()
    ranks.close()
    return 0
