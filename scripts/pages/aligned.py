"""The table of docs/distillation.md on teachers with another tokenizer, measured by scripts/measure_aligned_teachers.py."""

from __future__ import annotations

import textwrap

from measure_aligned_teachers import ACROSS, LEARN, OWN, ROWS, SHAPE, WORDS

from pages.markdown import Data, block, estimate, files, load, short, table

NAMES = {OWN: "the policy's tokens", WORDS: "tokens that end where words do", ACROSS: "tokens that cross words"}


def aligned_block(result: Data | None = None) -> str:
    """Write how well the policy learns from each teacher with each cut, from the committed report unless another is given."""
    result = load("aligned-teachers") if result is None else result
    if result is None:
        return "Not measured yet: `python scripts/measure_aligned_teachers.py` runs it, and `make docs` writes this."
    rows = {row["label"]: row for row in result["rows"] if row["summary"]}
    kind = result["kinds"][0]["measure"]
    text = (
        f"`distill` with {SHAPE[3]} samples for each of {SHAPE[1]} prompts at learning rate {SHAPE[5]}, until "
        f"{short(result['tokens'])} tokens have been sampled: held-out accuracy of {kind['samples']} samples on each of "
        f"{kind['problems']} problems, {len(result['seeds'])} seeds, interquartile mean and 95 % bootstrap interval. Teachers "
        f"have the embedded model's shape and began with random weights; {LEARN[1]} passes over the same worked answers made them "
        "as accurate as the table says."
    )
    body = [_row(result, name, rows[name]) for name in ROWS if name in rows]
    head = ("the teacher's tokenizer", "its accuracy", "`cut`", "accuracy", "of each seed", "area under the curve")
    examples = "; ".join(
        f"{NAMES[name]}: {_write_tokens(teacher['example'])}" for name, teacher in result["teachers"].items()
    )
    parts = (
        textwrap.fill(text, 140),
        table(head, body),
        textwrap.fill(_verdict(result), 140),
        f"An answer in each: {examples}.",
        f"All runs: {files('aligned-teachers')}.",
        block(result["measured_by"], "sh"),
    )
    return "\n\n".join(parts)


def _row(result: Data, name: str, row: Data) -> tuple[str, ...]:
    teacher, cut = ROWS[name]
    summary = row["summary"]
    return (
        NAMES[teacher],
        f"{result['teachers'][teacher]['accuracy']:.2f}",
        f"`{cut}`" if cut else "each token",
        estimate(summary["equal"]["tokens"]),
        ", ".join(f"{run['after']:.2f}" for run in row["runs"]),
        estimate(summary["area"]),
    )


def _verdict(result: Data) -> str:
    """Say of the two cuts, and of each beside the policy's own tokens, what the intervals at equal tokens allow."""
    texts = {1: "is better than", 0: "cannot be told from", -1: "is worse than"}
    cuts = [
        f"with {NAMES[teacher]} `words` {texts[_compare(result, f'{teacher}_words', f'{teacher}_tokens')]} `tokens`"
        for teacher in (WORDS, ACROSS)
    ]
    others = [name for name in ROWS if name != OWN]
    worse = sum(_compare(result, name, OWN) < 0 for name in others)
    wider = sum(_spread(result, name) > _spread(result, OWN) for name in others)
    return (
        f"At equal tokens, {' and '.join(cuts)}. {worse} of the {len(others)} rows with another tokenizer are worse than the one "
        f"with the policy's; the seeds of {wider} lie further apart than its seeds. The learning rate was not chosen for each."
    )


def _spread(result: Data, name: str) -> float:
    """Return how far the accuracies of a row's seeds lie apart."""
    accuracies = [run["after"] for row in result["rows"] if row["label"] == name for run in row["runs"]]
    return max(accuracies) - min(accuracies)


def _compare(result: Data, name: str, other: str) -> int:
    """Return 1 if a row is above another at equal tokens, -1 if it is below, and 0 if they cannot be told apart."""
    pair = next(pair for pair in result["pairs"] if {pair["first"], pair["second"]} == {name, other})
    is_higher = (pair["probability"]["tokens"]["value"] > 0.5) == (pair["first"] == name)
    return (1 if is_higher else -1) * pair["separated"]["tokens"]


def _write_tokens(tokens: list[str]) -> str:
    """Write the tokens of byte-level BPE with a stroke between them."""
    return f"`{'¦'.join(tokens).replace('Ġ', '·')}`"
