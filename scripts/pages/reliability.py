"""docs/reliability.md: tests/faults.toml as a table, its tests looked up in the code, and what was measured besides."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from pages.markdown import Data, block, load, page, table

COUNTED = {
    "kills": ("SIGKILL before and after each call of a save", "the checkpoint before, or this one, whole"),
    "errors": ("a disk error at each call of a save", "the same, and one error that says what is left"),
    "flips": ("one bit of a checkpoint turned", "named, and not loaded"),
    "supervised": (
        "SIGKILL of `sft` and `reward-model`",
        "weights, optimiser, metrics and files of a run never killed",
    ),
}
"""fault and promise of each kind, as in tests/faults.toml."""


def counted_section(found: Data | None) -> str:
    """How often each fault was made, and what did not hold."""
    head = "## Counted\n\nOn checkpoints of PPO's run of the embedded model, and on whole runs:"
    command = block("python scripts/stress_checkpoints.py", "sh")
    if found is None:
        return f"{head}\n\n{command}\n\nIts figures have not been taken yet; they will stand here."
    rows = []
    for kind, (fault, promise) in COUNTED.items():
        if seen := found.get(kind):
            told = seen.get("kinds") or [f"{name} {count}" for name, count in seen.get("phases", {}).items()]
            more = f" ({', '.join(told)})" if told else ""
            rows.append((fault + more, promise, str(seen["count"]), str(len(seen["wrong"]))))
    wrong = [f"- **It does not hold:** {text}." for kind in COUNTED for text in found.get(kind, {}).get("wrong", ())]
    lines = [head, command, table(("fault", "promise", "times", "did not hold"), rows)]
    commands = dict.fromkeys(f"`{seen['made_by']}` ({seen['machine']})" for seen in found.values())
    said = f"By {', '.join(commands)}. Kills of `policygrad train` are the soak's, below."
    return "\n\n".join([*lines, *(["\n".join(wrong)] if wrong else []), said])


def soak_section(found: Data | None, shorter: Data | None = None) -> str:
    """What the soak has seen. shorter: another one, of fewer steps, which is told below the first."""
    command = block("python scripts/stress_soak.py", "sh")
    head = (
        "## The soak\n\nOne run that is never killed and is watched, the same again with SIGKILL at random moments of every phase,"
        " and a comparison of what they leave, bit for bit:"
    )
    command += (
        "\n\nIn parts: with `--minutes 50` it ends with exit code 75 as long as there is more to do, and the same command goes on, "
        "with the same code only. With `--only watched` and `--only killed` in two terminals both runs go on at once, and the "
        "command without it compares them."
    )
    if found is None:
        return f"{head}\n\n{command}\n\nIts figures have not been taken yet; they will stand here."
    more = []
    if shorter is not None:
        again = f"python scripts/stress_soak.py --steps {shorter['steps']} --watch {shorter['looks_every']}"
        more = ["And a shorter one:", block(again, "sh"), *_told(shorter)]
    return "\n\n".join([head, command, *_told(found), *_held(found), *more])


def _told(found: Data) -> list[str]:
    """How long the runs were, what the kills fell into, and what they left."""
    said = [
        f"{found['steps']:,} steps of `{found['command']}` (torch {found['versions']['torch']}; {found['machine']})."
    ]
    if "kills" in found:
        phases = ", ".join(f"{name} {count}" for name, count in found["phases"].items())
        said.append(
            f"{found['kills']} kills ({phases}); the last process that a killed run had started was gone after "
            f"{found['slowest_to_be_gone']:.2f} s."
        )
    wrong = [f"- **It does not hold:** {text}." for text in found["broken"]]
    said.append(
        "\n".join(wrong) or "Weights, optimiser, metrics, completions and files were those of the run never killed."
    )
    return [*said, *([found["remarks"]] if found.get("remarks") else [])]


def _held(found: Data) -> list[str]:
    """What the run never killed held, from its first to its last fifth."""
    names = {"trainer_mib": "trainer, resident [MiB]", "workers_mib": "reward workers, resident [MiB]"}
    rows = [
        (
            names.get(name, name),
            *(f"{seen[key]:.1f}".removesuffix(".0") for key in ("first", "last", "least", "largest")),
            f"{100 * seen['apart']:.2f}",
        )
        for name, seen in found.get("held", {}).items()
    ]
    few = "" if found.get("judged") else "; these looks are too few for a judgement"
    told = (
        "Medians of the first and the last fifth of the run never killed, after a tenth of warm-up, extremes, and how far the "
        f"medians of its fifths are apart{few}:"
    )
    columns = ("", "at first", "at last", "least", "largest", "apart [%]")
    return [told, table(columns, rows)] if rows else []


TESTS = Path(__file__).resolve().parents[2] / "tests"

PROMISE = """A run that was stopped or killed, or has failed, can be resumed; nothing of what it had saved is lost. What cannot be
done is refused with the way out, before it costs anything; what goes wrong on the way is said, counted, or ends the run where it
can go on. What others have written (models, run folders, data, what a reward is given to judge) is read, and not run. Each line
below is held by the tests that it names. A test that is renamed, removed or skipped, or loses the case that a line is about,
fails `make lint`."""

NOT = """## What is not promised

- **Networks.** No test has one: models from the hub are fetched by their own libraries. Locks on a network file system are those
  that its server gives.
- **GPUs.** Nothing here has been run on one. Checks stand before what would fail on a device; the tests see them on a CPU. Bit
  for bit holds on a CPU in fp32 alone, with as many threads and the same torch.
- **Crafted files outside of `checkpoints/`.** Logs and configuration in a folder from somebody else are parsed, and code that
  they name needs leave; what else they say is believed.
- **Virtual machines.** Reward workers are processes: [what that isolates and what not](rewards-isolation.md); a program that
  exploits the kernel escapes [the sandbox](sandbox.md), too."""


class Lost(SystemExit):
    """A line of tests/faults.toml that no test holds."""


@cache
def _module(file: Path) -> tuple[str, dict[str, ast.stmt]]:
    """A test module's text, and what it defines by name."""
    if not file.is_file():
        raise Lost(f"tests/faults.toml: there is no {file.relative_to(TESTS.parent)}")
    text = file.read_text(encoding="utf-8")
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        defined |= dict.fromkeys(names, node)
    return text, defined


def _source(text: str, node: ast.stmt) -> str:
    """With its decorators, which hold the cases."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(text.split("\n")[first - 1 : node.end_lineno])


def _used(defined: dict[str, ast.stmt], name: str) -> set[str]:
    """A test, and what of its module it is made of, fixtures included."""
    found, new = set[str](), {name}
    while new:
        found |= new
        nodes = [node for name in new for node in ast.walk(defined[name])]
        inside = {node.id for node in nodes if isinstance(node, ast.Name)}
        new = ((inside | {node.arg for node in nodes if isinstance(node, ast.arg)}) & defined.keys()) - found
    return found


def looked_up(test: str) -> tuple[Path, str]:
    """The file and name of `FILE::NAME` or `FILE::NAME[text]`.

    Raises:
        Lost: there is no such test, it is skipped, or the text stands nowhere in it.
    """
    place, _, rest = test.partition("::")
    name, _, case = rest.removesuffix("]").partition("[") if rest.endswith("]") else (rest, "", "")
    file = TESTS / place
    text, defined = _module(file)
    node = defined.get(name)
    if not name.startswith("test_") or not file.name.startswith("test_") or not isinstance(node, ast.FunctionDef):
        raise Lost(f"tests/faults.toml: {place} has no test {name}")
    marks = {
        part.attr
        for decorator in node.decorator_list
        for part in ast.walk(decorator)
        if isinstance(part, ast.Attribute)
    }
    if marks & {"skip", "xfail"}:
        raise Lost(f"tests/faults.toml: {place}::{name} is not run: {', '.join(sorted(marks & {'skip', 'xfail'}))}")
    if case and not any(case in _source(text, defined[used]) for used in _used(defined, name)):
        raise Lost(f"tests/faults.toml: {place}::{name} has no case with {case}")
    return file, name


def faults() -> list[dict[str, Any]]:
    """The items of tests/faults.toml, each {"title", "fault": [[fault, promise, test, …], …]}."""
    return list(tomllib.loads((TESTS / "faults.toml").read_text(encoding="utf-8"))["item"])


def _link(test: str) -> str:
    """The test's name in words, linked to its file."""
    file, name = looked_up(test)
    words = name.removeprefix("test_").replace("_", " ").replace(" s own", "'s own")
    return f"[{words}](../tests/{file.relative_to(TESTS).as_posix()})"


def _rows(item: dict[str, Any]) -> str:
    found = []
    for fault, promise, *tests in item["fault"]:
        if not tests:
            raise Lost(f"tests/faults.toml: {fault!r} has no test")
        found.append((fault, promise, "; ".join(map(_link, tests))))
    return table(("fault", "promise", "test"), found)


def reliability_page(soak: Data | None = None, counts: Data | None = None) -> str:
    """The page. soak, counts: others than the committed ones."""
    sections = [f"## {number}. {item['title']}\n\n{_rows(item)}" for number, item in enumerate(faults(), 1)]
    measured = counted_section(counts or load("faults")), soak_section(soak or load("soak"), load("soak_short"))
    return page("# What a run survives, and what it refuses", PROMISE, *sections, *measured, NOT)
