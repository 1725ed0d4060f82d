"""docs/reference/*.md: every public name of the package on one of a few pages, and an index of them."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import policygrad
from pages.markdown import block, page, table
from policygrad import parts
from policygrad.algorithms import ALGORITHMS
from policygrad.commands.docstrings import read_field_docs
from policygrad.commands.render import format_part, shorten_number
from policygrad.core.algorithm import Algorithm
from policygrad.core.base import Part
from policygrad.core.validation import ROLES
from policygrad.training.base_trainer import TrainingResult

ROOT = Path(__file__).resolve().parents[2]
LINE = 100
"""Letters of a signature, beyond which each argument has a line of its own."""


def section(name: str, thing: Any) -> str:
    """What is said of a public name."""
    where = Path(inspect.getsourcefile(inspect.unwrap(thing)) or "").resolve().relative_to(ROOT).as_posix()
    parts = [
        f"## `{name}`",
        block(signature(name, thing), "python"),
        f"[`{thing.__module__}`](../../{where})",
        *_text(inspect.getdoc(thing) or ""),
    ]
    if isinstance(thing, type):
        parts += [_fields(thing), _methods(thing)]
    return "\n\n".join(filter(None, parts))


def signature(name: str, thing: Any) -> str:
    """As it is called; a dataclass without types, which its table has."""
    if not isinstance(thing, type):
        return _called(name, thing)
    if is_dataclass(thing):
        return _wrapped(f"{name}(", [f.name + _default(f, "=") for f in settable(thing)])
    if "__init__" in vars(thing) and not getattr(thing, "_is_protocol", False):
        return _called(name, thing.__init__)
    bases = [b.__name__ for b in thing.__bases__ if b.__name__ not in ("object", "Protocol")]
    return f"class {name}" + (f"({', '.join(bases)})" if bases else "")


def settable(kind: Any) -> list[Field[Any]]:
    """A dataclass's public fields."""
    return [f for f in fields(kind) if f.init and not f.name.startswith("_")]


def _called(name: str, function: Callable[..., Any]) -> str:
    """A function with its types."""
    output, written, keyword = inspect.signature(function), [], False
    for p in output.parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not keyword:
            written.append("*")
        keyword = keyword or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        kind = "" if p.annotation is p.empty else f": {_type(p.annotation)}"
        default = "" if p.default is p.empty else (" = " if kind else "=") + shown(p.default)
        written.append(f"{star}{p.name}{kind}{default}")
    back = output.return_annotation
    tail = ")" if back is output.empty or function.__name__ == "__init__" else f") -> {_type(back)}"
    return _wrapped(("async " if inspect.iscoroutinefunction(function) else "") + f"{name}(", written, tail)


def _wrapped(head: str, written: list[str], tail: str = ")") -> str:
    line = head + ", ".join(written) + tail
    return line if len(line) <= LINE else f"{head}\n    " + ",\n    ".join(written) + f",\n{tail}"


def _type(annotation: Any) -> str:
    """As the code has it, without what the command line's help is told beside it."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    result = re.fullmatch(r"Annotated\[(.*)\]", " ".join(text.split()))
    return text if result is None else _first(result[1])


def _first(text: str) -> str:
    """What stands before the first comma that is in no bracket."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            return text[:i].strip()
    return text.strip()


def _default(f: Field[Any], equals: str = "") -> str:
    if f.default is not MISSING:
        return equals + shown(f.default)
    return "" if f.default_factory is MISSING else equals + shown(f.default_factory())


def shown(value: Any) -> str:
    """A default in few words."""
    if isinstance(value, Algorithm) and value.name in ALGORITHMS:
        return f"pg.{value.name.upper()}"
    if is_dataclass(value) and not isinstance(value, type):
        text = format_part(value, changed=True)
        return text if text.endswith(")") else f"{text}()"
    if type(value).__repr__ is object.__repr__:  # an address in memory says nothing
        return f"{type(value).__name__}()"
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))}{',' * (len(value) == 1)})"
    if isinstance(value, float):
        return shorten_number(value)
    text = getattr(value, "__name__", repr(value))
    return f"{type(value).__name__}()" if " at 0x" in text else text


def _text(doc: str) -> Iterator[str]:
    """A docstring: paragraphs, lists of what `Args:` and its like name, and what is laid out as it stands."""
    for paragraph in re.split(r"\n\s*\n", doc.strip("\n")):
        head, _, rest = paragraph.partition("\n")
        if re.fullmatch(r"(Args|Returns|Raises):", head) and rest:
            yield f"**{head[:-1]}**\n\n" + "\n".join(_items(textwrap.dedent(rest)))
        elif any(re.search(r"\S {2,}\S", row) or row.startswith("  ") for row in paragraph.split("\n")):
            yield block(paragraph)
        else:
            yield escaped(" ".join(paragraph.split()))


def _items(text: str) -> Iterator[str]:
    """`name: what it is` per entry; lines that are further in go on with it."""
    for entry in re.split(r"\n(?! )", text):
        head, colon, rest = " ".join(entry.split()).partition(": ")
        named = bool(colon) and re.fullmatch(r"[\w*., ]+", head)
        yield f"- `{head}`: {escaped(rest)}" if named else f"- {escaped(head + colon + rest)}"


def escaped(text: str) -> str:
    """Text whose stars, brackets and angles are meant; what is between backticks, and what is bold, stays."""
    pieces = re.split(r"(`[^`]*`|\*\*[^*]+\*\*)", text)
    pieces[::2] = [re.sub(r"([*\[\]])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2]]
    return "".join(pieces)


def _fields(kind: Any) -> str:
    """A dataclass's fields, or the attributes that a role declares."""
    docs = read_field_docs(kind)
    if is_dataclass(kind):
        rows = [(f.name, _type(f.type), _default(f), docs.get(f.name, "")) for f in settable(kind)]
    else:
        own = inspect.get_annotations(kind)
        rows = [
            (n, _type(own[n]), shown(vars(kind)[n]) if n in vars(kind) else "", docs[n])
            for n in own
            if not n.startswith("_") and n in docs
        ]
    if not rows:
        return ""
    name = "field" if is_dataclass(kind) else "attribute"
    cells = [(*(f"`{x}`" if x else "" for x in row[:3]), escaped(row[3])) for row in rows]
    return table((name, "type", "default", "what it is"), cells)


def _methods(kind: type) -> str:
    """Its public methods and properties, but for those of which the base of its role tells."""
    known = {name for base in kind.__mro__[1:] if issubclass(base, Part) for name in vars(base)}
    rows = [
        (f"`{_head(name, member)}`", escaped(" ".join((inspect.getdoc(member) or "").split())))
        for name, member in vars(kind).items()
        if (name == "__call__" or not name.startswith("_")) and name not in known and _does(member)
    ]
    return table(("method", "what it does"), rows) if rows else ""


def _does(member: Any) -> bool:
    return inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)


def _head(name: str, member: Any) -> str:
    """In one line."""
    if isinstance(member, property):
        return name
    text = " ".join(_called(name, getattr(member, "__func__", member)).split())
    return text.replace("( ", "(").replace(", )", ")")


PAGES = {
    "training": (
        "Training",
        "A run, its options, and what follows it. On the command line an option is its field with dashes, "
        "`--learner.micro-tokens`; in a file of options a key in a table, `micro_tokens` in `[learner]`.",
        "train Run RunOptions SamplingParams SamplerConfig TeacherServerConfig LearnerConfig OptimizerConfig RewardConfig "
        "EvaluationConfig CheckpointConfig GuardConfig Result get_algorithm Trainer Callback Tracker RunInfo evaluate collect",
    ),
    "supervised": (
        "Fine-tuning and reward models",
        "Demonstrations and preferences, before reinforcement: [the whole path](../rlhf.md).",
        "train_sft SFTConfig train_reward_model RewardModelConfig SupervisedGuardConfig",
    ),
    "equation": (
        "The equation",
        "What the gradient is made of, on plain tensors. [Your own algorithm](../extending.md) puts parts into it.",
        "Algorithm Batch Forward SamplingMask surrogate objective gate_weight",
    ),
    "advantages": ("Advantages", "Links of the chain that makes Ψ: an algorithm's `advantage`.", "advantage"),
    "gates": (
        "Ratios, gates, corrections",
        "What the importance ratio lets through: an algorithm's `ratio`, `gate` and `corrections`.",
        "ratio gate corrections",
    ),
    "terms": (
        "Averages and terms",
        "How tokens are averaged, and what is added: an algorithm's `aggregation` and `terms`.",
        "aggregation terms",
    ),
    "filters": (
        "Filters and shaping",
        "Which answers take part, and what they are worth: an algorithm's `filters` and `shaping`.",
        "filters shaping",
    ),
    "steps": (
        "Steps, critics, references",
        "How the weights move, and the models besides the policy: `update_rule`, `critic`, `reward_model`, `reference`.",
        "update_rule critic reward_model reference GradientProblem CurvatureProblem AdaptiveProblem",
    ),
    "roles": (
        "What a part may declare",
        "The bases of an algorithm's parts. A part of your own inherits one and overrides what is different.",
        "Part Advantage Ratio Gate Correction Aggregation Term LossTerm Shaping Filter UpdateRule",
    ),
    "rollouts": (
        "Tasks, rewards, environments",
        "What is asked, what plays, what judges, and what comes of it.",
        "load_task Example reward RewardPool Environment SingleTurn ToolUse ToolCall McpTools AgentProgram "
        "GymnasiumText "
        "OpenEnv TextArena Verifiers Game GameStep SelfPlay Turn "
        "Action Observation Picture Step Rollouter Rollout Trajectory Segment",
    ),
    "models": (
        "Samplers and learners",
        "What draws completions, and what owns the weights. [One file each](../extending.md), if they are yours.",
        "Sampler Request Generation LocalSampler EngineSampler PublishedWeights Learner LearnerSpec LocalLearner "
        "make_local_learner load_reference clone_model",
    ),
    "errors": (
        "Errors",
        "Every refusal that is meant for you is a `PolicygradError`. [What to do about which](../troubleshooting.md).",
        "PolicygradError ConfigError DataError ModelError RewardError EngineError CheckpointError RunError HangError "
        "NumericsError",
    ),
}
"""File -> its title, what stands on top, and its names; a field of an algorithm stands for all parts that go into it."""
OTHERS = {"Result": TrainingResult}
"""What public names hold or return, by its own."""
CONSTANTS = {"ALGORITHMS", *(name.upper() for name in ALGORITHMS)}
"""Public names with pages of their own."""


def reference_pages() -> dict[str, str]:
    """File name -> text, with the index.

    Raises:
        SystemExit: a public name is on no page, or on two.
    """
    named = {file: _names(words) for file, (_, _, words) in PAGES.items()}
    every = [name for there in named.values() for name in there]
    odd = {*policygrad.__all__, *parts.__all__, *OTHERS} ^ CONSTANTS ^ {*every} | {
        name for name in every if every.count(name) > 1
    }
    if odd:
        raise SystemExit(f"PAGES of {__file__} must have each of {', '.join(sorted(odd))} once")
    return {
        "index.md": _index(named),
        **{
            f"{file}.md": page(f"# {title}", top, *map(_section, named[file]))
            for file, (title, top, _) in PAGES.items()
        },
    }


def _section(name: str) -> str:
    return section(name, OTHERS[name] if name in OTHERS else getattr(policygrad, name))


def _names(words: str) -> list[str]:
    return [name for word in words.split() for name in (_parts(word) if word in ROLES else [word])]


def _parts(place: str) -> list[str]:
    """What goes into a field of an algorithm."""
    kinds = ((name, getattr(parts, name)) for name in parts.__all__)
    return [name for name, kind in kinds if isinstance(kind, type) and issubclass(kind, ROLES[place].bases)]


def _index(named: dict[str, list[str]]) -> str:
    rows = [
        (f"[{PAGES[file][0]}]({file}.md)", " ".join(f"[`{n}`]({file}.md#{n.lower()})" for n in there))
        for file, there in named.items()
    ]
    constants = " ".join(f"[`{a.name.upper()}`](../algorithms/{a.name}.md)" for a in ALGORITHMS.values())
    return page(
        "# Reference",
        "`import policygrad as pg` knows all of these names, and imports what stands behind one when it is first used. "
        "The parts and the algorithms are listed in `policygrad.parts`.",
        table(("page", "names"), rows),
        f"`pg.ALGORITHMS`, a dict by name, holds an [`Algorithm`](equation.md#algorithm) each:\n\n{constants}",
        "The command line's options are the fields of [`Run`](training.md#run): `policygrad train --help all` lists them, with the "
        "parts of the algorithm at hand. What a run measures is a page of its own: [metrics](../metrics.md).",
    )
