"""Under torchrun: rank 0 takes a step in one process and in all of them, in float64, and compares the two."""

from __future__ import annotations

import json
import os
import traceback

import policygrad as pg
from doubles.ranked import agree, filled, learned, pair, values
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.learners.fsdp.torchrun import torchrun_rank
from policygrad.learners.fsdp.worker import join_torchrun

ALGORITHMS = (pg.GRPO, pg.PPO)


def main() -> int:
    """Compare, and print the number of processes."""
    launched = torchrun_rank()
    assert launched is not None
    rank, size = launched
    if rank:
        return join_torchrun()
    workers = WorkerGroup.start(size)
    for algorithm in ALGORITHMS:
        local, ranked, _ = pair(workers, algorithm)
        batch = filled(algorithm)
        expected, results = (values(learned(learner, algorithm, batch)) for learner in (local, ranked))
        tolerance = 1e-6 if algorithm.critic is not None else 1e-12  # a critic's values are float32
        for name, value in expected.items():
            assert abs(results[name] - value) <= tolerance * max(1.0, abs(value)), (name, value, results[name])
        agree(local, ranked, tolerance)
    print(json.dumps({"agree": size}), flush=True)
    workers.close()
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:  # at once: the others wait for this one
        traceback.print_exc()
        code = 1
    os._exit(code)
