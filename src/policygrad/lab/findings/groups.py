"""Larger groups, statistics over more completions than are trained on. All exact."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from policygrad.core.advantages import LeaveOneOut, RunningMean
from policygrad.core.aggregates import SequenceSum
from policygrad.lab.finding import Finding, percent, verdict
from policygrad.lab.findings.baselines import EXACT, centred, measured
from policygrad.lab.groups import all_steps
from policygrad.lab.measurement import measure
from policygrad.lab.worlds import one_prompt


def group_size(seed: int = 0) -> Finding:
    """The standard deviation of the group's gradient over G, and `group_power` ½, which divides by √G."""
    setting, sizes = one_prompt(length=2, seed=seed), (2, 3, 4, 6, 8)
    deviation = [math.sqrt(measured(centred(LeaveOneOut()), setting, size).variance) for size in sizes]
    rooted = replace(centred(LeaveOneOut()), aggregate=SequenceSum(group_power=0.5))
    found = [measured(rooted, setting, size) for size in sizes]
    slope = math.log(deviation[-1] / deviation[0]) / math.log(sizes[-1] / sizes[0])
    late = math.log(deviation[-1] / deviation[-3]) / math.log(sizes[-1] / sizes[-3])
    growth = math.log(found[-1].scale / found[0].scale) / math.log(sizes[-1] / sizes[0])
    holds = slope <= -0.5 + 1e-9
    return Finding(
        "group_size",
        "The noise of a group's gradient falls with √G, or faster.",
        holds,
        f"Under leave-one-out its standard deviation falls as G^{slope:.2f} from G = 2 to 8, and as G^{late:.2f} from 4 on: "
        f"{verdict(slope < -0.5, 'faster than G^-0.50, since the baseline improves too', 'as G^-0.50')}. Dividing by √G "
        f"instead of G lets the expected gradient grow as G^{growth:.2f} and its direction stay (cosine {found[-1].cosine:.3f}).",
        {"slope": slope, "slope_from_4": late, "growth_power_half": growth},
        curves={
            "group_size": tuple(map(float, sizes)),
            "deviation": tuple(deviation),
            "deviation_power_half": tuple(math.sqrt(f.variance) for f in found),
            "scale_power_half": tuple(f.scale for f in found),
        },
    )


def more_statistics(seed: int = 0) -> Finding:
    """G = 2 completions carry the gradient, N ≥ 2 the leave-one-out mean."""
    setting, size, more = one_prompt(length=2, seed=seed), 2, (0, 1, 2, 4)
    found = [measure(centred(LeaveOneOut()), setting, all_steps(setting, size, silent)).figures for silent in more]
    floor = measured(centred(RunningMean()), setting, size).variance
    whole = measured(centred(LeaveOneOut()), setting, size + more[-1]).variance
    falling = all(a.variance > b.variance for a, b in pairwise(found))
    holds = falling and max(f.bias for f in found) < EXACT
    saved = 1 - found[-1].variance / found[0].variance
    possible = 1 - floor / found[0].variance
    return Finding(
        "more_statistics",
        "Statistics over N ≥ G completions cut the variance of a gradient that uses G.",
        holds,
        f"With G = 2, a mean over N = 2, 3, 4 and 6 gives a variance of {', '.join(f'{f.variance:.2f}' for f in found)} of "
        f"‖∇J‖², unbiased throughout: {percent(saved)} less at N = 6, of {percent(possible)} that the exact J as baseline "
        f"would save. A gradient of all 6 has {whole:.2f}: {verdict(whole < found[-1].variance, 'training on them', 'counting')} "
        f"is worth more than {verdict(whole < found[-1].variance, 'counting', 'training on')} them.",
        {"saved": saved, "possible": possible, "variance_all": whole},
        curves={"N": tuple(float(size + m) for m in more), "variance": tuple(f.variance for f in found)},
    )
