"""The program of the ranks above 0, which execute what rank 0 sends."""

from __future__ import annotations

import os
import traceback
from contextlib import suppress

from policygrad.learners.fsdp.controller import SYMMETRIC_ERRORS, describe_lost_connection, report_shortage
from policygrad.learners.fsdp.learner import FsdpLearner, FsdpSpec
from policygrad.learners.fsdp.message_key import read_sent_key
from policygrad.learners.fsdp.processes import WorkerGroup, exit_with_parent
from policygrad.learners.fsdp.watchdog import HeartbeatThread
from policygrad.utils.out_of_memory import is_out_of_memory
from policygrad.utils.signals import ignore_signals
from policygrad.utils.spans import span


def main(port: int, rank: int, size: int) -> None:
    """Run a process that rank 0 of this machine, listening at `port`, has started; it never returns."""
    code = 1
    key = read_sent_key(0)
    exit_with_parent()
    try:
        code = serve_controller(WorkerGroup.join(port, rank, size, key))
    except BaseException:  # exit at once: other ranks may be waiting for this one
        traceback.print_exc()
    os._exit(code)


def join_torchrun() -> int:
    """Run one of torchrun's processes above rank 0 and return its exit code."""
    return serve_controller(WorkerGroup.from_torchrun())


def serve_controller(workers: WorkerGroup) -> int:
    """Execute rank 0's messages; return 0 at the end and 1 if another process is lost.

    Signals are ignored: those of a terminal and of torchrun reach every process, and rank 0 handles them.
    """
    ignore_signals()
    learner: FsdpLearner | None = None
    heartbeat = HeartbeatThread(workers.store, workers.rank, workers.machine)
    try:
        while (message := workers.receive_object()) is not None:
            with suppress(*SYMMETRIC_ERRORS):  # rank 0 raises them too
                if isinstance(message, FsdpSpec):
                    heartbeat.allow(message.learner.config.hang_timeout)
                    learner = FsdpLearner(workers, message)
                else:
                    function, args = message
                    with span(function.__name__.lstrip("_")):
                        function(learner, *args)
    except Exception as error:
        if is_out_of_memory(error):  # the others wait in a collective, which only this process's end ends
            report_shortage(workers, learner, error)
        elif not (isinstance(error, RuntimeError) and describe_lost_connection(error)):
            raise
        return 1
    heartbeat.close()
    workers.close()
    return 0
