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
from policygrad.core.chains import STAGES, describe_taken
from policygrad.core.validation import ROLES
from policygrad.training.base_trainer import TrainingResult

ROOT = Path(__file__).resolve().parents[2]
FIELDS_OF = {"RunOptions": "Run", "RewardModelConfig": "SFTConfig"}
"""Classes that share fields with another one, where these are listed."""
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
    """As it is called; a dataclass without types, which the list of its fields has."""
    if not isinstance(thing, type):
        return _called(name, thing)
    if name == "RunOptions":  # all of its fields are Run's
        return f"class {name}"
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
    if isinstance(value, frozenset) and value:  # its order is another one in each process
        return f"frozenset({{{', '.join(map(repr, sorted(value)))}}})"
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
    """A dataclass's fields, or the attributes that a role declares; their defaults are in the signature."""
    docs = read_field_docs(kind)
    if is_dataclass(kind):
        other = getattr(policygrad, FIELDS_OF[kind.__name__]) if kind.__name__ in FIELDS_OF else None
        shared = {} if other is None else read_field_docs(other)
        rows = [
            (f.name, _type(f.type), docs.get(f.name, ""))
            for f in settable(kind)
            if shared.get(f.name) != docs.get(f.name, "")
        ]
    else:
        own = inspect.get_annotations(kind)
        rows = [
            (n, _type(own[n]) + _attribute_default(kind, n), docs[n])
            for n in own
            if not n.startswith("_") and n in docs
        ]
    title = "Fields" if is_dataclass(kind) else "Attributes"
    lines = "\n".join(_entry(f"`{name}: {type_}`", text) for name, type_, text in rows)
    lines = lines and f"**{title}**\n\n{lines}"
    if kind.__name__ not in FIELDS_OF:
        return lines
    link = f"[`{FIELDS_OF[kind.__name__]}`](#{FIELDS_OF[kind.__name__].lower()})"
    return f"{lines}\n\nThe other fields are those of {link}." if lines else f"Its fields are those of {link}."


def _attribute_default(kind: Any, name: str) -> str:
    """Write ` = value` of a class attribute; a long value is left out."""
    text = f" = {shown(vars(kind)[name])}" if name in vars(kind) else ""
    return text if len(text) <= LINE else " = …"


def _entry(head: str, text: str) -> str:
    return f"- {head}: {escaped(text)}" if text else f"- {head}"


def _methods(kind: type) -> str:
    """Its public methods and properties, but for those that a base of the package documents, and checks of a section."""
    bases = [base for base in kind.__mro__[1:] if base.__module__.startswith("policygrad.")]
    known = {name for base in bases for name in vars(base)} | {"check"}
    rows = [
        _entry(f"`{_head(name, member)}`", _summary(inspect.getdoc(member) or ""))
        for name, member in vars(kind).items()
        if (name == "__call__" or not name.startswith("_"))
        and name not in known
        and _does(member)
        and inspect.getdoc(member)
    ]
    return "**Methods**\n\n" + "\n".join(rows) if rows else ""


def _summary(doc: str) -> str:
    """A method's first paragraph, and what its `Args:` and the like name."""
    first, *others = re.split(r"\n\s*\n", doc.strip())
    return " ".join(" ".join([first, *(p for p in others if re.match(r"(Args|Returns|Raises):", p))]).split())


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
        "A run, its options, and what follows it; fine-tuning and reward models ([the whole path](../rlhf.md)); errors "
        "([what to do about which](../troubleshooting.md)). On the command line an option is its field with dashes, "
        "`--learner.micro-tokens`; in a file of options a key in a table, `micro_tokens` in `[learner]`.",
        "train Run RunOptions SamplingParams SamplerConfig TeacherServerConfig LearnerConfig OptimizerConfig RewardConfig "
        "EvaluationConfig CheckpointConfig GuardConfig Result get_algorithm Trainer Callback Tracker RunInfo evaluate collect "
        "train_sft SFTConfig train_reward_model RewardModelConfig SupervisedGuardConfig "
        "PolicygradError ConfigError DataError ModelError RewardError EngineError CheckpointError RunError HangError "
        "NumericsError",
    ),
    "equation": (
        "The equation",
        "What the gradient is made of, on plain tensors, and the bases of its parts. [A part of your "
        "own](../extending.md) inherits one and overrides what is different.",
        "Algorithm Batch Forward SamplingMask surrogate objective gate_weight "
        "Part Advantage Ratio Gate Correction Aggregation Term LossTerm Shaping Filter UpdateRule",
    ),
    "advantages": ("Advantages", "Links of the chain that makes Ψ: an algorithm's `advantage`.", "advantage"),
    "parts": (
        "Gates, averages, terms, filters",
        "The other parts of an algorithm, in this order: `ratio`, `gate`, `corrections`; `aggregation`, `terms`; `filters`, "
        "`shaping`.",
        "ratio gate corrections aggregation terms filters shaping",
    ),
    "steps": (
        "Steps, critics, references",
        "How the weights move, and the models besides the policy: `update_rule`, `critic`, `reward_model`, `reference`.",
        "update_rule critic reward_model reference GradientProblem CurvatureProblem AdaptiveProblem",
    ),
    "rollouts": (
        "Tasks, rewards, environments",
        "Prompts, the environments that episodes run in, the rewards that score them, and the resulting rollout.",
        "load_task Example reward RewardPool Environment SingleTurn ToolUse ToolCall McpTools AgentProgram "
        "GymnasiumText "
        "OpenEnv TextArena Verifiers Game GameStep SelfPlay Turn "
        "Action Observation Picture Step Rollouter Rollout Trajectory Segment",
    ),
    "models": (
        "Samplers and learners",
        "What samples completions, and what owns the weights. [Your own](../extending.md) are one file each.",
        "Sampler Request Generation LocalSampler EngineSampler PublishedWeights Learner LearnerSpec LocalLearner "
        "make_local_learner load_reference clone_model",
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
            f"{file}.md": page(f"# {title}", top, *EXTRA.get(file, tuple)(), *map(_section, named[file]))
            for file, (title, top, _) in PAGES.items()
        },
    }


def chain_sections() -> tuple[str, ...]:
    """Write which links can follow which, from what they declare."""
    links = [(name, getattr(parts, name)()) for name in _parts("advantage")]
    by_rule: dict[tuple[str, str], list[str]] = {}
    for name, link in links:
        takes = "nothing: it comes first" if link.starts_chain else describe_taken(link.takes)
        gives = "what it takes" if link.gives is None else STAGES[link.gives]
        by_rule.setdefault((takes, gives), []).append(f"`{name}`")
    rows = [(", ".join(names), takes, gives) for (takes, gives), names in sorted(by_rule.items())]
    return (
        "## Which link can follow which",
        "Between two links Ψ is one of five things. An algorithm whose links do not fit is refused when it is built, with the "
        "remedy. `OptimalBaseline('logits')` gives a number for each token, and `BatchStd(of='rewards')` takes a reward; a part of "
        "your own takes anything and leaves it what it is, unless its class says `takes` and `gives`.",
        table(("links", "take", "give"), rows),
    )


EXTRA = {"advantages": chain_sections}


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
        "parts of the algorithm at hand.",
        "Registers: [metrics](../metrics.md) of a run, [JSON, exit codes](json.md), and [faults, promises and "
        "tests](reliability.md).",
    )
