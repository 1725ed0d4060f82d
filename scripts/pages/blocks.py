"""Generated parts of documentation pages: tables of what was tried or measured, options of other libraries, metrics."""

from __future__ import annotations

import re
import statistics
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from check_extras import read_extras
from pages.markdown import Data, block, load, page, table
from pages.measured import DARK, STYLE
from policygrad.commands import COMMANDS
from policygrad.commands.foreign_options import load_foreign_options
from policygrad.commands.json_output import Error
from policygrad.commands.json_schemas import is_event_stream, load_outputs, to_schema
from policygrad.models.chat.formats import list_formats
from policygrad.tasks.benchmarks import load_benchmarks
from policygrad.trackers.glossary import load_glossary
from stress_engines import KINDS

BENCHMARKS_HEAD = ("name", "what it is", "problems", "data", "revision", "grader", "k", "temperature, top-p", "tokens")
FAMILIES = Path(__file__).parents[2] / "tests" / "architectures.toml"
HEAD = ("`model_type`", "layers", "trains", "prompt sampled once", "and learned once", "LoRA leaves out")


def benchmarks_block() -> str:
    """Write the table of known benchmarks (docs/evaluation.md)."""
    rows = []
    for b in load_benchmarks().values():
        s, place = b.sampling, f"[{b.repository}](https://huggingface.co/datasets/{b.repository})"
        numbers = (f"{s.samples}", f"{s.temperature:g}, {s.top_p:g}", f"{s.max_tokens:,}")
        data = f"{place}{f' {b.config}' * bool(b.config)}, {b.split}"
        rows.append((f"`{b.name}`", b.title, f"{b.problems:,}", data, f"`{b.revision[:8]}`", f"`{b.reward}`", *numbers))
    return table(BENCHMARKS_HEAD, rows)


def architectures_block() -> str:
    """Write the table of model families (docs/models.md): those of tests/architectures.toml, alike ones in a row."""
    families = tomllib.loads(FAMILIES.read_text(encoding="utf-8"))["family"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for family in families:
        rows.setdefault(_cells(family), []).append(f"`{family['type']}`")
    return table(HEAD, [(", ".join(types), *cells) for cells, types in rows.items()])


def formats_block() -> str:
    """Write the table of chat formats (docs/models.md), in the order in which a template is compared with them."""
    rows: dict[str, tuple[str, str, str]] = {}
    for row in list_formats():
        models = ", ".join(filter(None, (rows[row.name][1] if row.name in rows else "", row.models)))
        rows[row.name] = f"`{row.name}`", models, f"`{row.example}`"
    return table(("format", "models", "a call"), list(rows.values()))


def templates_block() -> str:
    """Write the table of the chat templates that were tried (docs/models.md): how many work, and what the others do."""
    results = load("chat-templates") or {}
    rows = []
    for check in dict.fromkeys(name for result in results.values() for name in result):
        outcomes = {name: result[check] for name, result in results.items() if check in result}
        odd: dict[str, list[str]] = {}
        for name, outcome in outcomes.items():
            if outcome != "works":
                odd.setdefault(outcome, []).append(f"`{name}`")
        left = "; ".join(f"{outcome}: {', '.join(names)}" for outcome, names in odd.items())
        rows.append((check, f"{len(outcomes) - sum(map(len, odd.values()))} of {len(outcomes)}", left))
    return table(("", "works", "what the others do"), rows)


def _cells(family: Mapping[str, Any]) -> tuple[str, ...]:
    refused = family.get("refused")
    return (
        family["layers"],
        f"no: {refused}" if refused else "in full, with LoRA",
        "no" if "sampling" in family else "yes",
        {"tree": "yes", "cache": "by its cache", "texts": "no"}[family.get("learning", "tree")],
        ", ".join(f"`{name}`" for name in family.get("left_out", ())),
    )


_OPTION = re.compile(r"--[\w.-]*\w(?: (?:[A-Z]\w+|[\w./]+(?::[\w./]+)+|\w+=\S+|bf16|[\d.]+ [\d.]+)\b)?")
"""An option, and its value if that is a part, a file and its function, settings, a precision or two numbers."""


def options_block(library: str) -> str:
    """Write two tables: options of the library that have an equivalent here, and those that have none."""
    names = load_foreign_options()[0][library]
    present = {name: (_coded(ours.flag), _coded(ours.note)) for name, ours in names.items() if ours.flag}
    absent = {name: (_coded(ours.note),) for name, ours in names.items() if not ours.flag}
    absent_table = table((library, "no such option here"), _join_names(absent))
    return f"{table((library, 'policygrad', 'what differs'), _join_names(present))}\n\n{absent_table}"


def conversions_block() -> str:
    """Write the table of the examples that were converted, and which were not."""
    results = load("conversions") or {"date": "", "libraries": {}}
    head = (
        "library",
        "commit",
        "example files",
        "converted",
        "options",
        "translated",
        "left out, with a reason",
        "unknown",
    )
    rows, failures = [], dict[str, list[str]]()
    for name, row in results["libraries"].items():
        counts = [f"{row[key]:,}" for key in ("files", "converted", "options", "translated", "left_out", "unknown")]
        rows.append((name, f"{row['commit']}, {row['day']}", *counts))
        for item in row["failed"]:
            failures.setdefault(item["error"].partition(": ")[2], []).append(f"`{item['file']}` of {name}")
    about = (
        f"Every example of a policy gradient in these repositories, converted on {results['date']} with `python "
        "scripts/convert_examples.py verl=FOLDER …`. The last two are collections that use verl and TRL. A file counts as "
        "converted if a run was built from each command in it; an option counts as translated if a line is made of it, or if the "
        "file asks you for it."
    )
    missing = [
        textwrap.fill(f"- {', '.join(names)}: {reason}", 140, subsequent_indent="  ")
        for reason, names in failures.items()
    ]
    sections = (
        textwrap.fill(about, 140),
        table(head, rows),
        *(("Not converted:", "\n".join(missing)) if missing else ()),
    )
    return "\n\n".join(sections)


def supervised_options_block() -> str:
    """Write the table of options whose equivalent in `policygrad sft` and `reward-model` is not that of `train`."""
    rows = {name: (_coded(ours.flag), _coded(ours.note)) for name, ours in load_foreign_options()[1].items()}
    return table(("option", "`policygrad sft`, `reward-model`", "what differs"), _join_names(rows))


def _join_names(options: Mapping[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join the names of options that have the same cells into one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, cells in options.items():
        rows.setdefault(cells, []).append(f"`{name}`")
    return [(", ".join(names), *cells) for cells, names in rows.items()]


def _coded(text: str) -> str:
    """Put options between backticks, where they are not already."""
    pieces = text.split("`")
    pieces[::2] = [_OPTION.sub(lambda match: f"`{match[0]}`", piece) for piece in pieces[::2]]
    return "`".join(pieces)


ABOUT = (
    "Each step's line in `metrics.jsonl` holds these, as do the services of `--track`; `policygrad show NAME` explains one of "
    "them. `*` is a name from the run: a reward function or a part. Metrics that do not apply to a run are absent. In a step with "
    "several updates, a metric is the mean over the updates unless it says otherwise."
)


def metrics_page() -> str:
    """Write docs/metrics.md."""
    sections = []
    for section in load_glossary():
        rows = [(f"`{m.name}`", m.unit, m.text, m.interpretation or "–") for m in section.metrics]
        sections.append(f"## {section.title}\n\n{table(('metric', 'unit', 'what it is', 'when it moves'), rows)}")
    return page("# Metrics", ABOUT, *sections)


EXTRAS_HEAD = ("extra", "tried", "packages", "adds, MiB", "s to install", "without it", "with it")
FAILED = "**failed**"


def extras_block(report: Data | None = None) -> str:
    """Write the block, from the committed report unless another is given."""
    report = load("extras") if report is None else report
    if not report:
        return "Not tried yet: run `python scripts/check_extras.py`, then `make docs`."
    base, (extras, _) = report["policygrad"], read_extras()
    left = [name for name in extras if name not in {*report, "dev"}]
    versions = ", ".join(f"{name} {number}" for name, number in base["versions"].items())
    return "\n\n".join(
        (
            f"policygrad alone takes {base['mib']:,.0f} MiB and {base['seconds']:.0f} s to install, on Python {base['python']} "
            f"({versions}). Sizes are those of the installed files; seconds were measured on one machine with its package index.",
            _extras_table([_extras_row(name, extra) for name, extra in report.items() if name != "policygrad"]),
            "Measured by `python scripts/check_extras.py`."
            + (f" Not tried yet: {', '.join(f'`{name}`' for name in left)}." if left else ""),
        )
    )


def _extras_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Write the table, with its last two columns only where an extra did not do what it should."""
    if all(row[-2:] == ("refused", "works") for row in rows):
        said = (
            "Without its extra, each was refused with the command that installs it; with the extra alone, each works."
        )
        return f"{said}\n\n{table(EXTRAS_HEAD[:-2], [row[:-2] for row in rows])}"
    return table(EXTRAS_HEAD, rows)


def _extras_row(name: str, extra: dict[str, Any]) -> tuple[str, ...]:
    packages = ", ".join(f"{package} {number}" for package, number in extra["versions"].items())
    refused = dict.fromkeys(x if x in ("refused", "already installed") else FAILED for x in extra["without"])
    works = dict.fromkeys(x if x == "works" else FAILED for x in extra["with"])
    size = f"{extra['mib']:,.0f}" if "mib" in extra else ""  # not measured for some
    seconds, features = f"{extra['seconds']:.0f}", "; ".join(extra["features"])
    return f"`{name}`", features, packages, size, seconds, ", ".join(refused), ", ".join(works)


ENVIRONMENTS_HEAD = ("task", "seed", "before", "after", "gain", "steps", "sampled tokens", "changes by")


def learned_block(report: Mapping[str, Any] | None = None) -> str:
    """Write the block, from the committed results unless others are given."""
    report = load("environments") if report is None else report
    if not report:
        return "Not run yet: run `python scripts/measure_environments.py`, then `make docs`."
    body = []
    for task in report.values():
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
    one = next(iter(report.values()))
    versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
    completions = [
        f"- {task['title']}: `{task['said'][0]}` in the first step, `{task['said'][1]}` in the last"
        for task in report.values()
    ]
    return "\n\n".join(
        (
            f"`python scripts/measure_environments.py` ({versions}): GRPO, starting from the embedded model after fine-tuning on "
            "demonstrations. Before and after are mean rewards of two samples on each held-out problem.",
            table(ENVIRONMENTS_HEAD, body),
            "The first completion of the first and the last step, with the first seed (` / ` separates turns):",
            "\n".join(completions),
        )
    )


def _ends(ends: Mapping[str, list[float]]) -> str:
    """Write how other metrics changed from the first step to the last."""
    return ", ".join(f"{name.rpartition('/')[2].replace('_', ' ')} {a:.2f} → {b:.2f}" for name, (a, b) in ends.items())


REPAIR_HEAD = ("seed", "repaired before", "after", "calls per episode", "CPU minutes", "`policygrad verify`")


def repair_block(report: Mapping[str, Any] | None = None) -> str:
    """Write the commands and the table of docs/repair.md, from the committed results unless others are given."""
    report = load("repair") if report is None else report
    if not report:
        return "Not run yet: run `python scripts/measure_repair.py`, then `make docs`."
    body = []
    for seed, run in report["seeds"].items():
        (first, *_, last), verify = run["steps"], run["verify"]
        calls = " → ".join(f"{step['environment/calls']:.1f}" for step in (first, last))
        minutes = f"{run['seconds'] / 60:.1f}"
        found = f"{verify['holds']} hold, {verify['differs']} differ, {verify['not checked']} not checked"
        body.append((seed, _interval(*run["before"]), _interval(*run["after"]), calls, minutes, found))
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    runs, prepared = list(report["seeds"].values()), sum(report["prepare_seconds"].values())
    per_episode = sum(run["seconds"] for run in runs) / sum(run["episodes"] for run in runs)
    repeated = sorted({tuple(run["verified_steps"]) for run in runs})
    text = (
        "Before and after are the shares of the held-out bugs that were repaired, four episodes each, with intervals of 95 % over "
        f"bugs. What comes before the training took {prepared / 60:.1f} CPU minutes, once; a run takes {per_episode:.2f} CPU "
        f"seconds per episode ({versions})."
    )
    steps = " or ".join(" and ".join(map(str, each)) for each in repeated)
    checked = (
        f"`verify` repeats steps {steps} of {len(runs[0]['steps'])}, agents and tests included, and compares the files of all "
        "steps."
    )
    commands = "\n".join(_continue(command) for command in report["commands"])
    return "\n\n".join((block(commands, "sh"), text, table(REPAIR_HEAD, body), checked))


def _interval(mean: float, error: float) -> str:
    """Write a rate with its interval of 95 %."""
    return f"{mean:.2f} ± {1.96 * error:.2f}"


def _continue(command: str, width: int = 116) -> str:
    """Write a command on lines of a width, in the shell's way."""
    return " \\\n    ".join(textwrap.wrap(command, width, break_long_words=False, break_on_hyphens=False))


ENGINES_HEAD = (
    "sampled by",
    "held-out accuracy after",
    "mean",
    "largest probe",
    "100 steps: probes",
    "largest",
    "median",
    "s each",
    "MiB each",
)


def engines_block(report: Data | None = None) -> str:
    """Write the block, from the committed report unless another is given."""
    report = load("engines") if report is None else report
    runs = (
        {name: report[name] for name in ("local", "llama_cpp", "vllm") if report and name in report} if report else {}
    )
    if report is None or not runs:
        return "Not measured yet: run `python scripts/measure_engines.py`, then `make docs`."
    lines = [
        "`policygrad train grpo` with its default options, one run per seed; weights are published after every step. The "
        "probe is the largest difference between log-probabilities of server and learner, in nats."
    ]
    lines.append(table(ENGINES_HEAD, [_engines_row(name, run) for name, run in runs.items()]))
    if "throughput" in report:
        lines.append(_throughput(report["throughput"]))
    commands = dict.fromkeys(run["command"] for run in [*runs.values(), *filter(None, [report.get("throughput")])])
    return "\n\n".join([*lines, "Measured by " + ", ".join(f"`{command}`" for command in commands) + "."])


def _engines_row(name: str, run: dict[str, Any]) -> tuple[str, ...]:
    seeds, long = run["seeds"].values(), run.get("long")
    after = [seed["eval_reward_after"] for seed in seeds]
    probes = [seed["probe_max"] for seed in seeds if "probe_max" in seed]
    cells = (
        "this process" if name == "local" else name,
        ", ".join(f"{x:.3f}" for x in after),
        f"{statistics.mean(after):.3f}",
    )
    if long is None:
        return (*cells, *("–",) * 6)
    nats = [max(probes), long["probe_max"], long["probe_median"]]
    largest, further, median = (f"{x:.1e}" for x in nats)
    return (*cells, largest, str(long["publications"]), further, median, f"{long['seconds']:.2f}", f"{long['mib']:.1f}")


def _throughput(report: dict[str, Any]) -> str:
    each = {name: statistics.median(values) for name, values in report["tokens_per_second"].items()}
    rates = ", ".join(f"{name} {value:,.0f}" for name, value in each.items())
    turns = len(next(iter(report["tokens_per_second"].values())))
    return (
        f"Tokens per second of one vLLM server, medians of {turns} turns, with completions of the maximum length: {rates} "
        f"(a ratio of {report['share']:.2f})."
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


def faults_block(report: dict[str, Any] | None = None) -> str:
    """Write the block, from the committed report unless another is given."""
    report = load("engine-faults") if report is None else report
    if report is None:
        return "Not measured yet: run `python scripts/stress_engines.py`, then `make docs`."
    rows = [_engine_faults_row(kind, seen) for kind, seen in report["kinds"].items() if "steps" in seen]
    versions = ", ".join(f"{name} {report['versions'][name]}" for name in ("xllamacpp", "torch"))
    intro = (
        f"`{report['made_by']}`: two real llama.cpp servers, the embedded model, "
        f"`--max-staleness {report['staleness']}`, each fault at "
        f"random moments, lasting a random time ({versions}; {report['machine']}). {report.get('note', '')}".rstrip()
    )
    wrong = "\n".join(f"- **Broken:** {text}." for text in report["broken"])
    return "\n\n".join(part for part in (intro, table(ENGINE_FAULTS_HEAD, rows) if rows else "", wrong) if part)


def _engine_faults_row(kind: str, seen: dict[str, Any]) -> tuple[str, ...]:
    moments = ", ".join(f"{name} {count}" for name, count in sorted(seen["moments"].items()))
    return (KINDS[kind], f"{seen['repeats']}: {moments}", *(f"{seen[name]:,}" for name in _COUNTS))


MATH_KINDS = {"right": "right answers in another notation that got 0", "wrong": "wrong answers that got 1"}


def math_block(report: Mapping[str, Any] | None = None) -> str:
    """Write the block, from the committed results unless others are given."""
    report = load("math_rewards") if report is None else report
    if not report:
        return "Not run yet: run `python scripts/measure_math.py`, then `make docs`."
    body = [
        (
            text,
            data,
            f"{_sum(rows, 'answers'):,}",
            *(f"{_errors(rows, grader):,}" for grader in ("policygrad", "math_verify")),
        )
        for kind, text in MATH_KINDS.items()
        for data, rows in report[kind].items()
    ]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    parts = [
        f"Errors of `math` and of math-verify alone ({versions}):",
        table(("", "of", "answers", "`math`", "math-verify"), body),
        "By notation, where one of them errs; each answer is in a box or a sentence:",
        table(("", "written as", "answers", "`math`", "math-verify", "example"), _math_errors(report)),
        block(report["measured_by"], "sh"),
    ]
    return "\n\n".join(parts)


def _math_errors(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for kind in MATH_KINDS:
        for data, ways in report[kind].items():
            for way in ways:
                errors = [way["errors"][grader] for grader in ("policygrad", "math_verify")]
                if any(errors):
                    examples = way["examples"].get("policygrad") or way["examples"]["math_verify"]
                    reference, completion = examples[0]
                    shown = f"`{reference}` and `{' '.join(completion.split())}`"
                    rows.append((f"{data}, {kind}", way["name"], f"{way['answers']:,}", *map(str, errors), shown))
    return rows


def _sum(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(row[name] for row in rows)


def _errors(rows: Sequence[Mapping[str, Any]], grader: str) -> int:
    return sum(row["errors"][grader] for row in rows)


def serve_block(report: Data | None = None) -> str:
    """Write the block, from the committed results unless others are given."""
    report = load("serve") if report is None else report
    if not report:
        return "Not run yet: run `python scripts/stress_serve.py --kills 200 --results docs/results/serve.json`, then `make docs`."
    parts, commands = [], []
    if steps := {name.removeprefix("step of "): x for name, x in report.items() if name.startswith("step of ")}:
        rows = [
            (
                name.partition(",")[0],
                f"{x['prompts']} × {x['samples']}, up to {x['max_tokens']} tokens",
                f"{x['process_tokens']:,}",
                *(f"{x[f'{p}_seconds']:.2f} ({x.get(f'{p}_cpu_seconds', '–')})" for p in ("process", "server")),
                f"{x['overhead']:+.0%}",
            )
            for name, x in steps.items()
        ]
        added = steps["tiny"]["server_seconds"] - steps["tiny"]["process_seconds"]
        parts += [
            "A step on 2 CPU cores, in the server's process without HTTP, and by the SDK through the server (seconds, medians, in "
            "turns; in brackets CPU seconds of server and client). Most of what is added is the SDK's and the server's work on "
            f"some 130 requests and 512 data, whatever the model: {added:.1f} s. Those of SmolLM2-135M are one or two steps on a "
            "machine that others use too, and differ by more than that.",
            table(("model", "completions", "sampled tokens", "in process", "through the server", "more"), rows),
        ]
        for name, x in steps.items():
            commands.append(
                f"python scripts/measure_serve.py --model {name.partition(',')[0]} --max-tokens {x['max_tokens']}"
            )
    if x := report.get("embedded task"):
        means = {name: f"{x[f'{name}_mean']:.3f}" for name in ("served", "train")}
        parts.append(
            f"The embedded task, {x['steps']} updates, {len(x['seeds'])} seeds: tinker-cookbook's `rl_loop` through the server "
            f"reaches {means['served']} ({_listed(x['served'])}), and `policygrad train` {means['train']} ({_listed(x['train'])}), "
            "as held-out accuracy. Prompts are in another order, and random numbers are others."
        )
        commands.append(".environments/tinker/bin/python scripts/run_cookbook.py embedded")
    if x := report.get("kills"):
        parts.append(
            f"{x['kills']} SIGKILLs under a client that took {x['updates']:,} steps: all {x['checkpoints']:,} saves that were "
            f"answered are there, {x['updates']:,} updates were counted, and all {x['tensors']} tensors of weights and moments are "
            "the undisturbed server's, bit for bit."
        )
        commands.append(f"python scripts/stress_serve.py --kills {x['kills']}")
    shown = block("\n".join(f"{command} --results docs/results/serve.json" for command in commands), "sh")
    return "\n\n".join([*parts, shown])


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def accuracy_block(report: Mapping[str, Any] | None = None) -> str:
    """Write the block, from the committed results unless others are given."""
    report = load("ranks") if report is None else report
    if not report:
        return "Not run yet: run `python scripts/measure_default.py --ranks`, then `make docs`."
    runs = report["runs"]
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed}, key=int)
    body = []
    for ranks, by_seed in runs.items():
        after = [f"{by_seed[seed]['after']:.3f}" if seed in by_seed else "" for seed in seeds]
        before = fmean(run["before"] for run in by_seed.values())
        mean = fmean(run["after"] for run in by_seed.values())
        body.append((ranks, f"{before:.3f}", *after, f"{mean:.3f}"))
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return "\n\n".join(
        (
            f"`python scripts/measure_default.py --ranks` ({versions}): held-out accuracy of "
            "`policygrad train --learner.world-size N`, "
            "before (mean of the seeds) and after.",
            table(("processes", "before", *(f"seed {seed}" for seed in seeds), "mean"), body),
        )
    )


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 50, 620, 20, 220


def real_model_block(report: dict[str, Any] | None = None) -> str:
    """Write the block, from the committed results unless others are given."""
    report = load("smollm2") if report is None else report
    if report is None:
        return "Not run yet: run `python scripts/measure_smollm2.py`, then `make docs`."
    (_, before, error_before), (_, after, error_after) = report["eval/reward"][0], report["eval/reward"][-1]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    seconds = report["processor_seconds"]
    took = f", {seconds / 60:.0f} minutes of processor time" if seconds else ""
    weights = f" Its weights: {report['weights']}." if report["weights"] else ""
    intro = (
        f"`{report['made_by']}`, one seed ({versions}; {report['machine']}{took}).{weights} Held-out accuracy on 128 "
        f"of the {report['problems']['eval/reward']} held-out questions, 4 samples each at temperature 1: "
        f"**{before:.3f} ± {error_before:.3f} before, {after:.3f} ± {error_after:.3f} after** {report['steps']} steps "
        f"(standard errors over problems)."
    )
    rows = [
        (str(a["step"]), a["prompt"], f"`{a['completion'].strip()!r}`", f"{a['reward']:g}") for a in report["answers"]
    ]
    answers = table(("step", "question", "answer", "reward"), rows)
    picture = "![Mean reward of each step](smollm2.svg)"
    return "\n\n".join(
        (intro, picture, answers, "The run, in the folder with the problems:", block(report["command"], "sh"))
    )


def real_model_picture(report: dict[str, Any] | None = None) -> str:
    """Draw an SVG of the mean reward of each step, and the held-out score before and after with its standard error."""
    report = load("smollm2") if report is None else report
    if report is None:
        return _svg(['<text x="20" y="35">Not run yet.</text>'])
    end = max(step for step, _ in report["curve"])

    def at(step: float, value: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * step / end, BOTTOM - (BOTTOM - TOP) * value

    shapes = []
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = at(0, level)
        shapes.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        shapes.append(f'<text class="small" x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{level:g}</text>')
    points = " ".join("{:.1f},{:.1f}".format(*at(step, reward)) for step, reward in report["curve"])
    shapes.append(f'<polyline class="curve" points="{points}"/>')
    for step, score, error in report["eval/reward"]:
        x, low = at(step, score - error)
        _, high = at(step, score + error)
        shapes.append(f'<path class="eval" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
        shapes.append(f'<circle class="eval" cx="{x:.1f}" cy="{(low + high) / 2:.1f}" r="4"/>')
    caption = "line: mean reward of the 128 answers of a step; circles: held-out accuracy, ± a standard error"
    shapes.append(f'<text class="small" x="{LEFT}" y="{BOTTOM + 18}">step 0</text>')
    shapes.append(f'<text class="small" x="{RIGHT}" y="{BOTTOM + 18}" text-anchor="end">{end}</text>')
    shapes.append(f'<text class="small" x="{LEFT}" y="{HEIGHT - 6}">{caption}</text>')
    return _svg(shapes)


def _svg(shapes: list[str]) -> str:
    eval_style = ".eval { fill: #1a7f37; stroke: #1a7f37; stroke-width: 1.5 }"
    style = f"<style>{STYLE}\n  {eval_style}\n  @media (prefers-color-scheme: dark) {{{DARK}\n  }}\n</style>"
    page = f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
    return "\n".join([head, "<title>SmolLM2-135M-Instruct learns sums</title>", style, page, *shapes, "</svg>"]) + "\n"


def json_block() -> str:
    """Write the fields of each command's JSON, from the schemas."""
    nested, sections = dict[str, Data](), list[str]()
    by_outputs: dict[tuple[Any, ...], list[str]] = {}
    for command in COMMANDS:
        if outputs := load_outputs(command):
            by_outputs.setdefault(outputs, []).append(command)
    for outputs, commands in by_outputs.items():
        title = ", ".join(f"`{command}`" for command in commands)
        forms = [_json_form(to_schema(kind), nested) for kind in outputs]
        sections.append("\n\n".join([f"### {title}", *forms]))
    error = _json_form(to_schema(Error), nested)
    shared = list[str]()
    done = set[str]()
    while todo := [name for name in nested if name not in done]:  # which may name further ones
        done |= {*todo}
        shared += [_json_form(nested[name], nested) for name in todo]
    return "\n\n".join([f"### An error\n\n{error}", *sections, "### Types named above", *shared])


def describe_json() -> str:
    """Describe the output under --json."""
    streams = [name for name in COMMANDS if (outputs := load_outputs(name)) and is_event_stream(outputs)]
    return (
        "Under `--json`, standard output carries JSON and nothing else: one object, or for "
        f"{', '.join(f'`{name}`' for name in streams)} one object per event, a line each; `chat` prints one per answer. Progress "
        "and warnings, and what your code or a child process prints, go to standard error. Numbers that are not finite are null. "
        "The fields are [below](#what-each-command-prints); `policygrad COMMAND --json-schema` prints them as a JSON Schema. "
        "Fields may be added: ignore those that you do not know. `completion` has no `--json`, since its output is a script. An "
        "error is an object too, on standard output, beside the sentence on standard error; it is then the last line:"
    )


def _json_form(schema: Data, nested: dict[str, Data]) -> str:
    """Write an object's description and the table of its fields, and note the objects in them."""
    if "properties" not in schema:
        return f"{_json_type(schema, nested).capitalize()}."
    fields = [
        (f"`{n}` ({_json_type(field, nested)})", field.get("description")) for n, field in schema["properties"].items()
    ]
    plain = ", ".join(name for name, text in fields if not text)
    lines = [f"- {plain}"] * bool(plain) + [f"- {name}: {text}" for name, text in fields if text]
    return "\n".join([f"**{schema['title']}.** {schema['description']}\n", *lines])


def _json_type(schema: Data, nested: dict[str, Data]) -> str:
    if "properties" in schema:
        nested.setdefault(schema["title"], schema)
        return schema["title"]
    if "allOf" in schema:
        return _json_type(schema["allOf"][0], nested)
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_json_type(each, nested) for each in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_json_type(schema['items'], nested)}"
    if schema.get("type") == "object":
        return f"object of {_json_type(schema['additionalProperties'], nested)}"
    return str(schema.get("type", "anything"))
