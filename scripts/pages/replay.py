"""The section of docs/measured.md on groups of equal rewards: scores measured by scripts/measure_replay.py."""

from __future__ import annotations

from measure_replay import FILTERS, SHAPE

from pages.markdown import Data, block, estimate, files, load, short, table

INTRO = """## Groups of equal rewards

A group whose rewards are all equal teaches nothing. `--algorithm.filters ReplayBuffer` puts a group of an earlier step in its
place: of those with unequal rewards the buffer keeps the `size` with the largest spread, for `max-age` steps, with the versions of
the weights that sampled them and the sampler's log-probabilities, so that π_old/μ corrects for their age. Groups are drawn by
their spread, none twice in a step; with `--algorithm.filters.replay-buffer.no-reuse` none is drawn again. A resumed run has the
buffer, and `replay/used`, `replay/age` and `staleness/age_N` tell what it does ([metrics](metrics.md),
[settings](reference/parts.md#replaybuffer)). `DropZeroVariance` leaves such groups out, or samples further prompts instead.

Does it pay?"""
NAMES = {
    "none": "nothing",
    "replay": "`ReplayBuffer`, 64 groups for 8 steps",
    "replay_2_steps": "`ReplayBuffer`, for 2 steps",
    "replay_once": "`ReplayBuffer`, each drawn once",
    "drop": "`DropZeroVariance`, dropped",
    "reweight": "`DropZeroVariance`, reweighted",
    "refill": "`DropZeroVariance`, further prompts",
}


def replay_section(result: Data | None = None) -> str:
    """Return the section, from the committed report unless another is given."""
    result = load("replay") if result is None else result
    if result is None:
        missing = "Not measured yet: `python scripts/measure_replay.py` runs it, and `make docs` writes this."
        return f"{INTRO}\n\n{missing}"
    rows = {row["label"]: row for row in result["rows"] if row["summary"]}
    body = [_row(name, rows[name]) for name in FILTERS if name in rows]
    kind = result["kinds"][0]["measure"]
    text = (
        f"`grpo` with {SHAPE[1]} samples for each of {SHAPE[3]} prompts, until {short(result['tokens'])} tokens have been sampled, "
        f"what is replayed not counted; held-out accuracy of {kind['samples']} samples on each of {kind['problems']} problems, "
        f"{len(result['seeds'])} seeds, each row at the best learning rate of a grid: interquartile mean and 95 % bootstrap "
        "interval."
    )
    head = ("in their place", "learning rate", "accuracy", "area under the curve", "updates")
    return "\n\n".join(
        [
            INTRO,
            text,
            table(head, body),
            _verdict(result),
            f"All runs: {files('replay')}. {result.get('note', '')}".rstrip(),
            block(result["measured_by"], "sh"),
        ]
    )


def _row(name: str, row: Data) -> tuple[str, ...]:
    summary = row["summary"]
    rate = f"{row['option_value']:g}" + "\\*" * bool(row["edge"])
    return (
        NAMES[name],
        rate,
        estimate(summary["equal"]["tokens"]),
        estimate(summary["area"]),
        f"{summary['means']['updates']:.0f}",
    )


def _verdict(result: Data) -> str:
    """Say of the buffer, at equal tokens, what the intervals allow: what it is above of, below of, and neither; and how far rows of
    its learning rate lie apart over the whole curve."""
    found = {"above": list[str](), "open": list[str](), "below": list[str]()}
    for pair in result["pairs"]:
        if "replay" not in (names := [pair["first"], pair["second"]]):
            continue
        other = names[names[0] == "replay"]
        is_higher = (pair["probability"]["tokens"]["value"] > 0.5) == (names[0] == "replay")
        found[("above" if is_higher else "below") if pair["separated"]["tokens"] else "open"].append(other)
    texts = {"above": "is above", "below": "is below", "open": "cannot be told from"}
    parts = [f"{texts[kind]} {_list(found[kind])}" for kind in texts if found[kind]]
    answer = "Here it does." if "none" in found["above"] else "Not here."
    rates = {row["label"]: row["option_value"] for row in result["rows"]}
    areas = [row["summary"]["area"]["value"] for row in result["rows"] if rates[row["label"]] == rates["replay"]]
    same = (
        f"Areas can be compared at one learning rate, of which \\* marks the edge of the grid: those of the {len(areas)} rows at "
        f"{rates['replay']:g} lie between {min(areas):.3f} and {max(areas):.3f}."
    )
    return f"{answer} At equal tokens the buffer of 8 steps {'; it '.join(parts)}. {same}"


def _list(names: list[str]) -> str:
    every = [f"*{NAMES[name]}*" for name in FILTERS if name in names]
    return " and ".join([", ".join(every[:-1]), every[-1]] if len(every) > 1 else every)
