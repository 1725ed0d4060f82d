"""The table in docs/architectures.md: every row of tests/architectures.toml is trained by a test, or seen refused."""

from __future__ import annotations

import re
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from check_extras import read_extras
from pages.markdown import Data, block, load, page, table
from pages.measured import DARK, STYLE
from policygrad.commands.foreign_options import load_foreign_options
from policygrad.trackers.glossary import MetricSection, load_glossary
from stress_engines import KINDS

FAMILIES = Path(__file__).parents[2] / "tests" / "architectures.toml"
HEAD = ("`model_type`", "layers", "trains", "prompt sampled once", "LoRA leaves out", "tested by")


def architectures_block() -> str:
    """The table of families, in the order of the file."""
    families = tomllib.loads(FAMILIES.read_text(encoding="utf-8"))["family"]
    return table(HEAD, [_row(family) for family in families])


def _row(family: Mapping[str, Any]) -> tuple[str, ...]:
    refused = family.get("refused")
    return (
        f"`{family['type']}`",
        family["layers"],
        f"no: {refused}" if refused else "in full, with LoRA",
        "yes" if family.get("shares") else "no",
        ", ".join(f"`{name}`" for name in family.get("left_out", ())),
        "`make test`" if family.get("short") else "`make test-long`",
    )


_OPTION = re.compile(r"--[\w.-]*\w(?: (?:[A-Z]\w+|[\w./]+(?::[\w./]+)+|\w+=\S+|bf16|[\d.]+ [\d.]+)\b)?")
"""An option, and a value that stands behind it: a part, a file and its function, settings, a precision, two numbers."""


def options(library: str) -> str:
    """Two tables: what has a name here, and what has none."""
    names = load_foreign_options()[0][library]
    there = [(f"`{name}`", _coded(ours.flag), _coded(ours.note)) for name, ours in names.items() if ours.flag]
    not_there = [(f"`{name}`", _coded(ours.note)) for name, ours in names.items() if not ours.flag]
    none = table((library, "no such option here"), not_there)
    return f"{table((library, 'policygrad', 'what differs'), there)}\n\n{none}"


def supervised(library: str) -> str:
    """The names for which `policygrad sft` and `reward-model` have another answer than `train`."""
    own = {name: ours for name, ours in load_foreign_options()[1].items() if name in load_foreign_options()[0][library]}
    rows = [(f"`{name}`", _coded(ours.flag), _coded(ours.note)) for name, ours in own.items()]
    return table((library, "`policygrad sft`, `reward-model`", "what differs"), rows)


def _coded(text: str) -> str:
    """Options between backticks, where they are not already."""
    pieces = text.split("`")
    pieces[::2] = [_OPTION.sub(lambda found: f"`{found[0]}`", piece) for piece in pieces[::2]]
    return "`".join(pieces)


ABOUT = (
    "Each step's line in `metrics.jsonl` holds these, as do the services of `--track`; `policygrad show NAME` says one of them. "
    "`*` stands for what a run names: a reward function, a part. A number that does not apply to a run is absent. Numbers of a "
    "step with several updates are means over what the updates saw, unless they say otherwise."
)


def metrics_page() -> str:
    """The page."""
    return page("# Metrics", ABOUT, *(_chapter(chapter) for chapter in load_glossary()))


def _chapter(chapter: MetricSection) -> str:
    rows = [(f"`{m.name}`", m.unit, m.text, m.interpretation or "–") for m in chapter.metrics]
    return f"## {chapter.title}\n\n{table(('metric', 'unit', 'what it is', 'when it moves'), rows)}"


EXTRAS_HEAD = ("extra", "tried", "packages", "adds, MiB", "s to install", "without it", "with it")
WITHOUT = {"refused": "refused", "already installed": "already installed"}


def extras_block(found: Data | None = None) -> str:
    """The block. found: another report than the committed one."""
    found = load("extras") if found is None else found
    if not found:
        return "Not tried yet: `python scripts/check_extras.py` does it, and `make docs` writes this."
    base, (extras, _) = found["policygrad"], read_extras()
    left = [name for name in extras if name not in {*found, "dev"}]
    versions = ", ".join(f"{name} {number}" for name, number in base["versions"].items())
    return "\n\n".join(
        (
            f"policygrad alone takes {base['mib']:,.0f} MiB and {base['seconds']:.0f} s to install, on Python {base['python']} "
            f"({versions}). Bytes are those of the installed files; seconds are of one machine and its package index.",
            table(EXTRAS_HEAD, [_extras_row(name, extra) for name, extra in found.items() if name != "policygrad"]),
            "By `python scripts/check_extras.py`."
            + (f" Not tried by it yet: {', '.join(f'`{name}`' for name in left)}." if left else ""),
        )
    )


def _extras_row(name: str, extra: dict[str, Any]) -> tuple[str, ...]:
    packages = ", ".join(f"{package} {number}" for package, number in extra["versions"].items())
    refused = dict.fromkeys(WITHOUT.get(said, "**not as it should be**") for said in extra["without"])
    works = dict.fromkeys(said if said == "works" else "**not as it should be**" for said in extra["with"])
    size = f"{extra['mib']:,.0f}" if "mib" in extra else ""  # of some it was not taken
    seconds, shown = f"{extra['seconds']:.0f}", "; ".join(extra["features"])
    return f"`{name}`", shown, packages, size, seconds, ", ".join(refused), ", ".join(works)


ENVIRONMENTS_HEAD = ("task", "seed", "before", "after", "gain", "steps", "sampled tokens", "changes by")


def learned_block(found: Mapping[str, Any] | None = None) -> str:
    """The block. found: other results than the committed ones."""
    found = load("environments") if found is None else found
    if not found:
        return (
            "Not run yet: `python scripts/measure_environments.py` runs them, and `make docs` writes what came of it."
        )
    body = []
    for task in found.values():
        for seed, run in task["seeds"].items():
            before, after = run["before"], run["after"]
            cells = (
                f"{before:.3f}",
                f"{after:.3f}",
                f"{after - before:+.3f}",
                str(task["steps"]),
                f"{run['tokens']:,}",
            )
            body.append((task["title"], seed, *cells, _ends(run["ends"])))
    one = next(iter(found.values()))
    versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
    said = [
        f"- {task['title']}: `{task['said'][0]}` in the first step, `{task['said'][1]}` in the last"
        for task in found.values()
    ]
    return "\n\n".join(
        (
            f"`python scripts/measure_environments.py` ({versions}): GRPO on what demonstrations have made of the embedded model. "
            "Before and after are mean rewards of two samples on each of the held-out problems.",
            table(ENVIRONMENTS_HEAD, body),
            "The first completion of a step, of the first seed (` / ` stands between turns):",
            "\n".join(said),
        )
    )


def _ends(ends: Mapping[str, list[float]]) -> str:
    """What else moved, from the first step to the last."""
    return ", ".join(f"{name.rpartition('/')[2].replace('_', ' ')} {a:.2f} → {b:.2f}" for name, (a, b) in ends.items())


ENGINES_HEAD = (
    "drawn by",
    "held-out accuracy after",
    "mean",
    "largest probe",
    "100 steps: probes",
    "largest",
    "median",
    "s each",
    "MiB each",
)


def engines_block(found: Data | None = None) -> str:
    """Return the measurements of engines, from the committed report unless another is given."""
    found = load("engines") if found is None else found
    runs = {name: found[name] for name in ("local", "llama_cpp", "vllm") if found and name in found} if found else {}
    if found is None or not runs:
        return "Not measured yet: `python scripts/measure_engines.py` runs it, and `make docs` writes this."
    lines = [
        "`policygrad train grpo` with its default options, one run per seed; weights are published to disk after every step. The "
        "probe is the largest difference between log-probabilities of server and learner, in nats."
    ]
    lines.append(table(ENGINES_HEAD, [_engines_row(name, run) for name, run in runs.items()]))
    if "throughput" in found:
        lines.append(_throughput(found["throughput"]))
    commands = dict.fromkeys(run["command"] for run in [*runs.values(), *filter(None, [found.get("throughput")])])
    return "\n\n".join([*lines, "By " + ", ".join(f"`{command}`" for command in commands) + "."])


def _engines_row(name: str, run: dict[str, Any]) -> tuple[str, ...]:
    seeds, long = run["seeds"].values(), run.get("long")
    after = [seed["eval_reward_after"] for seed in seeds]
    probes = [seed["probe_max"] for seed in seeds if "probe_max" in seed]
    told = (
        "this process" if name == "local" else name,
        ", ".join(f"{x:.3f}" for x in after),
        f"{statistics.mean(after):.3f}",
    )
    if long is None:
        return (*told, *("–",) * 6)
    nats = [max(probes), long["probe_max"], long["probe_median"]]
    largest, further, median = (f"{x:.1e}" for x in nats)
    return (*told, largest, str(long["publications"]), further, median, f"{long['seconds']:.2f}", f"{long['mib']:.1f}")


def _throughput(found: dict[str, Any]) -> str:
    each = {name: statistics.median(values) for name, values in found["tokens_per_second"].items()}
    rates = ", ".join(f"{name} {value:,.0f}" for name, value in each.items())
    turns = len(next(iter(found["tokens_per_second"].values())))
    return (
        f"Tokens per second of one vLLM server, medians of {turns} turns, with completions of the maximum length: {rates} "
        f"(a ratio of {found['share']:.2f})."
    )


ENGINE_FAULTS_HEAD = (
    "fault",
    "times, while …",
    "groups",
    "lost",
    "trained on twice",
    "completions",
    "of another version",
    "asked again",
    "ended and resumed",
)
_COUNTS = ("groups", "lost", "twice", "completions", "of_another_version", "asked_again", "ended_and_resumed")


def faults_block(found: dict[str, Any] | None = None) -> str:
    """The block. found: another report than the committed one."""
    found = load("engine-faults") if found is None else found
    if found is None:
        return "Not measured yet: `python scripts/stress_engines.py` runs it, and `make docs` writes this table."
    rows = [_engine_faults_row(kind, seen) for kind, seen in found["kinds"].items() if "steps" in seen]
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("xllamacpp", "torch"))
    intro = (
        f"`{found['made_by']}`: two real llama.cpp servers, the embedded model, "
        f"`--max-staleness {found['staleness']}`, each fault at "
        f"random moments, for a random while ({versions}; {found['machine']}). {found.get('note', '')}".rstrip()
    )
    wrong = "\n".join(f"- **It does not hold:** {text}." for text in found["broken"])
    return "\n\n".join(part for part in (intro, table(ENGINE_FAULTS_HEAD, rows) if rows else "", wrong) if part)


def _engine_faults_row(kind: str, seen: dict[str, Any]) -> tuple[str, ...]:
    moments = ", ".join(f"{name} {count}" for name, count in sorted(seen["moments"].items()))
    return (KINDS[kind], f"{seen['repeats']}: {moments}", *(f"{seen[name]:,}" for name in _COUNTS))


MATH_KINDS = {"right": "right answers, written in another way, that got 0", "wrong": "wrong answers that got 1"}


def judged_block(found: Mapping[str, Any] | None = None) -> str:
    """The block. found: other results than the committed ones."""
    found = load("math_rewards") if found is None else found
    if not found:
        return "Not run yet: `python scripts/measure_math.py` runs it, and `make docs` writes what came of it."
    body = [
        (
            text,
            data,
            f"{_sum(rows, 'answers'):,}",
            *(f"{_errors(rows, judge):,}" for judge in ("policygrad", "math_verify")),
        )
        for kind, text in MATH_KINDS.items()
        for data, rows in found[kind].items()
    ]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    parts = [
        f"Errors of `math` and of math-verify alone ({versions}):",
        table(("", "of", "answers", "`math`", "math-verify"), body),
        "By the way of writing, where one of them errs; each answer stands in a box or a sentence:",
        table(("", "written as", "answers", "`math`", "math-verify", "such as"), _ways(found)),
        block(found["measured_by"], "sh"),
    ]
    return "\n\n".join(parts)


def _ways(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for kind in MATH_KINDS:
        for data, ways in found[kind].items():
            for way in ways:
                errors = [way["errors"][judge] for judge in ("policygrad", "math_verify")]
                if any(errors):
                    examples = way["examples"].get("policygrad") or way["examples"]["math_verify"]
                    reference, completion = examples[0]
                    shown = f"`{reference}` and `{' '.join(completion.split())}`"
                    rows.append((f"{data}, {kind}", way["name"], f"{way['answers']:,}", *map(str, errors), shown))
    return rows


def _sum(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(row[name] for row in rows)


def _errors(rows: Sequence[Mapping[str, Any]], judge: str) -> int:
    return sum(row["errors"][judge] for row in rows)


def accuracy_block(found: Mapping[str, Any] | None = None) -> str:
    """The block. found: other results than the committed ones."""
    found = load("ranks") if found is None else found
    if not found:
        return "Not run yet: `python scripts/measure_default.py --ranks` runs them, and `make docs` writes what came of it."
    runs = found["runs"]
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed}, key=int)
    body = []
    for ranks, by_seed in runs.items():
        after = [f"{by_seed[seed]['after']:.3f}" if seed in by_seed else "" for seed in seeds]
        before = fmean(run["before"] for run in by_seed.values())
        mean = fmean(run["after"] for run in by_seed.values())
        body.append((ranks, f"{before:.3f}", *after, f"{mean:.3f}"))
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return "\n\n".join(
        (
            f"`python scripts/measure_default.py --ranks` ({versions}): held-out accuracy of "
            "`policygrad train --learner.world-size N`, "
            "before (mean of the seeds) and after.",
            table(("processes", "before", *(f"seed {seed}" for seed in seeds), "mean"), body),
        )
    )


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 50, 620, 20, 220


def seen_block(found: dict[str, Any] | None = None) -> str:
    """The block. found: other results than the committed ones."""
    found = load("smollm2") if found is None else found
    if found is None:
        return "Not run yet: `python scripts/measure_smollm2.py` runs it, and `make docs` writes what came of it."
    (_, before, error_before), (_, after, error_after) = found["eval/reward"][0], found["eval/reward"][-1]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    seconds = found["processor_seconds"]
    took = f", {seconds / 60:.0f} minutes of processor time" if seconds else ""
    weights = f" Its weights: {found['weights']}." if found["weights"] else ""
    intro = (
        f"`{found['made_by']}`, one seed ({versions}; {found['machine']}{took}).{weights} Held-out accuracy on 128 "
        f"of the {found['problems']['eval/reward']} questions that are not trained on, 4 samples each at temperature 1: "
        f"**{before:.3f} ± {error_before:.3f} before, {after:.3f} ± {error_after:.3f} after** {found['steps']} steps "
        f"(standard errors over problems)."
    )
    rows = [
        (str(a["step"]), a["prompt"], f"`{a['completion'].strip()!r}`", f"{a['reward']:g}") for a in found["answers"]
    ]
    said = table(("step", "question", "answer", "reward"), rows)
    picture = "![Mean reward of each step](real-model.svg)"
    return "\n\n".join(
        (intro, picture, said, "The run, in the folder with the problems:", block(found["command"], "sh"))
    )


def picture(found: dict[str, Any] | None = None) -> str:
    """The SVG: each step's mean reward as a dot, their line, and the held-out score before and after with its standard error."""
    found = load("smollm2") if found is None else found
    if found is None:
        return _svg(['<text x="20" y="35">Not run yet.</text>'])
    end = max(step for step, _ in found["curve"])

    def at(step: float, value: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * step / end, BOTTOM - (BOTTOM - TOP) * value

    shapes = []
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = at(0, level)
        shapes.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        shapes.append(f'<text class="small" x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{level:g}</text>')
    points = " ".join("{:.1f},{:.1f}".format(*at(step, reward)) for step, reward in found["curve"])
    shapes.append(f'<polyline class="curve" points="{points}"/>')
    for step, score, error in found["eval/reward"]:
        x, low = at(step, score - error)
        _, high = at(step, score + error)
        shapes.append(f'<path class="held" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
        shapes.append(f'<circle class="held" cx="{x:.1f}" cy="{(low + high) / 2:.1f}" r="4"/>')
    words = "line: mean reward of the 128 answers of a step; circles: held-out accuracy, ± a standard error"
    shapes.append(f'<text class="small" x="{LEFT}" y="{BOTTOM + 18}">step 0</text>')
    shapes.append(f'<text class="small" x="{RIGHT}" y="{BOTTOM + 18}" text-anchor="end">{end}</text>')
    shapes.append(f'<text class="small" x="{LEFT}" y="{HEIGHT - 6}">{words}</text>')
    return _svg(shapes)


def _svg(shapes: list[str]) -> str:
    held = ".held { fill: #1a7f37; stroke: #1a7f37; stroke-width: 1.5 }"
    style = f"<style>{STYLE}\n  {held}\n  @media (prefers-color-scheme: dark) {{{DARK}\n  }}\n</style>"
    page = f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
    return "\n".join([head, "<title>SmolLM2-135M-Instruct learns sums</title>", style, page, *shapes, "</svg>"]) + "\n"
