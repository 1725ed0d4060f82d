"""A process of rank 1 and above: it does what rank 0 says, and nothing else."""

from __future__ import annotations

import os
import signal
import traceback
from contextlib import suppress

from policygrad.learners.fsdp.controller import SYMMETRIC_ERRORS, describe_lost_connection
from policygrad.learners.fsdp.learner import FsdpLearner, FsdpSpec
from policygrad.learners.fsdp.processes import WorkerGroup, exit_with_parent
from policygrad.learners.fsdp.watchdog import HeartbeatThread
from policygrad.utils.signals import SIGNALS


def main(port: int, rank: int, size: int) -> None:
    """Of a process that rank 0 has started, which listens at this port of the machine. It does not return."""
    code = 1
    exit_with_parent()
    try:
        code = serve_controller(WorkerGroup.join(port, rank, size))
    except BaseException:  # at once, so that nobody waits for what this one holds
        traceback.print_exc()
    os._exit(code)


def join_torchrun() -> int:
    """Of one of torchrun's processes above rank 0: its exit code."""
    return serve_controller(WorkerGroup.from_torchrun())


def serve_controller(workers: WorkerGroup) -> int:
    """Until rank 0 says that it is over, 0; or another process has gone, 1, which has said why. Signals are rank 0's: those of a
    terminal and of torchrun come to all."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    learner: FsdpLearner | None = None
    heartbeat = HeartbeatThread(workers.store, workers.rank)
    try:
        while (message := workers.receive_object()) is not None:
            with suppress(*SYMMETRIC_ERRORS):  # which rank 0 raises too
                if isinstance(message, FsdpSpec):
                    learner = FsdpLearner(workers, message)
                else:
                    function, args = message
                    function(learner, *args)
    except RuntimeError as error:
        if not describe_lost_connection(error):
            raise
        return 1
    heartbeat.close()
    workers.close()
    return 0
