"""The named algorithms as a run can take them."""

from __future__ import annotations

from dataclasses import replace

import policygrad as pg

SINGLE_TURN = [name for name, algorithm in pg.ALGORITHMS.items() if not algorithm.reads_observations]
"""Those that learn from single answers; the others need an environment."""


def runnable(name: str, teacher: str = "tiny") -> pg.Algorithm:
    """The row; where it learns from a teacher, with that model for one. The embedded and the random model have one tokenizer."""
    algorithm = pg.get_algorithm(name)
    is_own_teacher = algorithm.reference is not None and algorithm.reference.templates
    if algorithm.reads_reward or is_own_teacher:
        return algorithm
    return replace(algorithm, reference=pg.Reference(model=teacher))


def trainable(name: str) -> pg.Algorithm:
    """The same without the mask of truncated answers, which leaves none to learn from where all are cut off after a few tokens; and
    where some of a group are chosen, two."""
    algorithm = runnable(name)
    filters = (f for f in algorithm.filters if not isinstance(f, pg.MaskTruncated))
    return replace(algorithm, filters=tuple(replace(f, keep=2) if isinstance(f, pg.Downsample) else f for f in filters))
