"""What was to be reached, what was measured, and why what is missing is missing: in figures, from the same results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench import operations
from bench.machine import processor
from bench.summary import Estimate, Row, linearity, reached, rows, short
from bench.works import SEVEN, WORKS, Work

Data = Mapping[str, Any]
ACCURACY = 0.85
"""Held-out, of the embedded task: what both are timed on their way to."""
TRL, OURS, BF16 = "trl-fp32", "policygrad-fp32", "policygrad-bf16"
BY_NAME: dict[str, Work] = {work.name: work for work in WORKS}


@dataclass(frozen=True)
class Target:
    """A measure, and how large it was to be."""

    measure: str
    asked: float
    found: Callable[[Data], float | None]
    """None where nothing was measured."""
    at_most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.asked if self.at_most else value >= self.asked


def row(data: Data, work: str, side: str) -> Row | None:
    """One thread's."""
    found = (r for r in rows(data.get("measurements", {}), work) if (r.side, r.threads) == (side, 1))
    return next(found, None)


def ratio(work: str, side: str, measure: str) -> Callable[[Data], float | None]:
    """TRL's over ours; measure: `cpu`, `wall` or `memory`."""

    def find(data: Data) -> float | None:
        theirs, ours = row(data, work, TRL), row(data, work, side)
        return getattr(theirs, measure).median / getattr(ours, measure).median if theirs and ours else None

    return find


def cell(name: str, first: str, column: str) -> Callable[[Data], float | None]:
    """Of a component's table: in the row that begins so."""

    def find(data: Data) -> float | None:
        table = data.get("components", {}).get(name)
        if table is None or column not in table["columns"]:
            return None
        at = table["columns"].index(column)
        return next((float(line[at]) for line in table["rows"] if str(line[0]).startswith(first)), None)

    return find


def is_one_machine(data: Data, work: str, *components: str) -> bool:
    """Return whether a work and the components were measured on one processor: seconds of two explain nothing."""
    works = [r for k, r in data.get("measurements", {}).items() if k.startswith(f"{work}/")]
    return len({processor(r) for r in [*works, *(data["components"][name] for name in components)]}) == 1


def off_the_line(data: Data) -> float | None:
    """The largest distance of a step's time from a line through 0, as a share of it."""
    return _furthest(_sizes(data))


def _furthest(points: list[tuple[float, float]]) -> float | None:
    if len(points) < 2:
        return None
    return max(map(abs, linearity([p[0] for p in points], [p[1] for p in points])[1]))


def _sizes(data: Data) -> list[tuple[float, float]]:
    """(sampled tokens of a step, its CPU seconds), the smallest first."""
    points = []
    for work in (work for work in WORKS if work.scale):
        if (found := row(data, work.name, OURS)) is not None:
            kept = (r for k, r in data["measurements"].items() if k.startswith(f"{work.name}/{OURS}/1/"))
            points.append((next(kept)["facts"]["tokens"][-1], found.cpu.median))
    return points


def learning(data: Data) -> float | None:
    """TRL's CPU seconds to the accuracy, over ours; None where not every repeat came there."""
    theirs, ours = (until(data, side, "cpu") for side in (TRL, OURS))
    return None if theirs is None or ours is None else theirs / ours


def until(data: Data, side: str, unit: str) -> float | None:
    """Of training to the accuracy, the median, in CPU or wall seconds or `steps`; None where not every repeat came there."""
    kept = [r for k, r in data.get("measurements", {}).items() if k.startswith(f"learning/{side}/1/")]
    found = [reached({**r, "steps": [{**s, "steps": 1.0} for s in r["steps"]]}, ACCURACY, unit) for r in kept]
    came = [spent for spent in found if spent is not None]
    return Estimate.of(came).median if came and len(came) == len(kept) else None


TARGETS = (
    Target("TRL ÷ ours, CPU seconds per step, 7M", 3, ratio("7m", OURS, "cpu")),
    Target("the same, ours in bfloat16", 4, ratio("7m", BF16, "cpu")),
    Target("TRL ÷ ours, peak memory, 7M", 4, ratio("7m", OURS, "memory")),
    Target("learner's share of the matrix-multiply rate, 7M", 0.6, cell("matmul", "7M, fp32", "share")),
    Target("the same, 25M", 0.6, cell("matmul", "25M, fp32", "share")),
    Target("TRL ÷ ours, CPU seconds per step, embedded task", 6, ratio("embedded", OURS, "cpu")),
    Target("rollout over `generate`, geometric lengths", 3, cell("rollout", "128 of", "ratio")),
    Target("step time over tokens: furthest from a line through 0", 0.1, off_the_line, at_most=True),
    Target(f"TRL ÷ ours, CPU seconds to {ACCURACY} held-out accuracy", 8, learning),
)


def measured(data: Data) -> list[tuple[Target, float]]:
    """The targets of which something is known."""
    return [(target, value) for target in TARGETS if (value := target.found(data)) is not None]


def reasons(data: Data) -> list[str]:
    """A paragraph for each kind of target that is missed."""
    missed = {target.measure for target, value in measured(data) if not target.met(value)}
    told = {
        TARGETS[0].measure: _time(data),
        TARGETS[1].measure: _half(data),
        TARGETS[2].measure: _memory(data),
        TARGETS[3].measure: _share(data),
        TARGETS[5].measure: _embedded(data),
        TARGETS[7].measure: _grown(data),
        TARGETS[8].measure: _learned(data),
    }
    return [text for measure, text in told.items() if measure in missed and text]


def _time(data: Data) -> str:
    """Of the 7M work: what its operations take at the speed of a matrix product, and what the rest is."""
    theirs, ours = row(data, "7m", TRL), row(data, "7m", OURS)
    rate = cell("matmul", "7M, fp32", "matrix product, Gflop/s")(data)
    if theirs is None or ours is None or rate is None or not is_one_machine(data, "7m", "matmul"):
        return ""
    work = BY_NAME["7m"]
    facts = next(r["facts"] for k, r in data["measurements"].items() if k.startswith(f"7m/{OURS}/1/"))
    prompt = round(facts["prompt_tokens"][-1] / facts["completions"][-1])
    groups = [(prompt, [work.max_tokens] * work.samples)] * work.prompts
    drawing, learning = operations.forward(SEVEN, groups) / 1e9, operations.gradient(SEVEN, groups) / 1e9
    floor, asked = (drawing + learning) / rate, theirs.cpu.median / TARGETS[0].asked
    seen = " What the rest of the time goes to is in the profile below." * ("profile" in data.get("components", {}))
    return (
        f"**Seconds of the 7M work.** A step cannot do without {drawing:,.0f} Gflop to draw completions and {learning:,.0f} to "
        f"learn from them: {short(floor)} s at the {rate:.0f} Gflop/s of a bare matrix product. It takes "
        f"{short(ours.cpu.median)} s, {floor / ours.cpu.median:.0%} of that rate; a third of TRL's time would be "
        f"{short(asked)} s, or {floor / asked:.0%}. Attention, and a key-value cache that is read once for every "
        f"token that is drawn, are bound by memory, not by arithmetic.{seen}"
    )


def _half(data: Data) -> str:
    """Of the 7M work in bfloat16: how little of it is matrix products."""
    theirs, ours = row(data, "7m", TRL), row(data, "7m", BF16)
    rate = cell("matmul", "7M, bf16", "matrix product, Gflop/s")(data)
    parts = ("matrix products", "attention")
    shares = [cell("profile", f"{name}, bf16", part)(data) for part in parts for name in ("drawing", "learning")]
    if theirs is None or ours is None or rate is None or None in shares:
        return ""
    if not is_one_machine(data, "7m", "matmul", "profile"):
        return ""
    drawing, learning, *attention = (f"{share:.0%}" for share in shares if share is not None)
    return (
        f"**bfloat16.** The step takes {short(ours.cpu.median)} s, and {short(theirs.cpu.median / TARGETS[1].asked)} s would be a "
        f"quarter of TRL's. A bare matrix product runs at {rate:,.0f} Gflop/s in bfloat16, so products have become "
        f"{drawing} of drawing and {learning} of learning, and attention {attention[0]} and {attention[1]} (profile below, "
        "without compiled blocks): what is left is reading and writing memory, which half the bits make half as much at best."
    )


def _memory(data: Data) -> str:
    """How TRL's peak follows its micro-batch, of which it has the fastest."""
    theirs, prefix = row(data, "7m", TRL), f"7m/{TRL}/1/"
    grid = data.get("grid", {})
    peaks = {int(key.removeprefix(prefix)): r["peak_mib"] for key, r in grid.items() if key.startswith(prefix)}
    if theirs is None or len(peaks) < 2:
        return ""
    least, most = min(peaks), max(peaks)
    return (
        f"**Memory of the 7M work.** TRL's peak follows its micro-batch: {peaks[least]:,.0f} MiB at {least} completions and "
        f"{peaks[most]:,.0f} at {most}, on a quarter of the prompts. It is given the fastest one, and takes "
        f"{theirs.memory.median:,.0f} MiB in a whole step."
    )


def _share(data: Data) -> str:
    """What the learner's time goes to."""
    parts = ("matrix products", "attention", "element by element", "between operations")
    shares = [cell("profile", "learning, fp32", part)(data) for part in parts]
    if None in shares:
        return ""
    told = [f"{share:.0%} {part}" for share, part in zip(shares, parts, strict=True) if share is not None]
    return f"**Share of the rate.** In float32 the learner's time is {', '.join(told[:-1])} and {told[-1]} (profile below)."


def _embedded(data: Data) -> str:
    """Of the embedded task: drawing and learning at the speeds that they have alone."""
    theirs, ours = row(data, "embedded", TRL), row(data, "embedded", OURS)
    drawn = cell("rollout", "embedded", "policygrad, tokens per CPU s")(data)
    learned = cell("savings", "embedded", "sampled tokens per CPU s")(data)
    if theirs is None or ours is None or drawn is None or learned is None:
        return ""
    if not is_one_machine(data, "embedded", "rollout", "savings"):
        return ""
    facts = next(r["facts"] for k, r in data["measurements"].items() if k.startswith(f"embedded/{OURS}/1/"))
    tokens, asked = facts["tokens"][-1], theirs.cpu.median / TARGETS[5].asked
    return (
        f"**The embedded task.** A step's {tokens:,} tokens take {short(tokens / drawn)} s to draw and {short(tokens / learned)} s "
        f"to learn from, at the speeds below, of {short(ours.cpu.median)} s. A sixth of TRL's {short(theirs.cpu.median)} s would "
        f"be {short(asked)} s: {tokens / asked:,.0f} tokens a second in both together."
    )


def _grown(data: Data) -> str:
    """What a token takes in small and in large steps."""
    points = _sizes(data)
    off = _furthest(points[2:])
    if off is None:
        return ""
    (few, fast), (many, slow) = ((tokens, 1000 * seconds / tokens) for tokens, seconds in (points[0], points[-1]))
    return (
        f"**Step time over tokens.** A token takes {short(fast)} ms in a step of {few:,} and {short(slow)} in one of {many:,}: "
        f"where few completions are drawn at once, the weights are read for fewer tokens. From {points[2][0]:,} tokens on time is "
        f"linear within {off:.0%}."
    )


def _learned(data: Data) -> str:
    """How many steps it takes, and how many times longer TRL's are."""
    times = ratio("learning", OURS, "cpu")(data)
    theirs, ours = (until(data, side, "steps") for side in (TRL, OURS))
    if times is None or theirs is None or ours is None:
        return ""
    return (
        f"**Accuracy over time.** TRL comes to {ACCURACY} after {short(theirs)} steps and policygrad after {short(ours)}, medians, "
        "with straight lines between the steps that were measured; a step of TRL's takes "
        f"{short(times)} times as long."
    )
