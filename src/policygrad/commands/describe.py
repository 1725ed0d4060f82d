"""What `policygrad show` says of an algorithm, a part or a benchmark, as rows of text and as the object of --json.

Of the package's own, the command prints what `scripts/make_docs.py` wrote down from here; of a user's, it comes from here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass
from importlib import import_module
from typing import Any

import policygrad
from policygrad.algorithms import ALGORITHMS
from policygrad.catalog import CATALOG
from policygrad.commands.docstrings import read_field_docs, summarise_docstring
from policygrad.commands.render import (
    EQUATION_COLUMNS,
    describe_algorithm,
    format_part,
    shorten_number,
)
from policygrad.commands.styled import HEAD, NAME, QUIET, TextRow
from policygrad.compare.plan import LADDERS
from policygrad.core.algorithm import Algorithm, append_link
from policygrad.core.base import Advantage, Part
from policygrad.core.gates import Clip
from policygrad.core.validation import ROLES, frozen_problem
from policygrad.errors import ConfigError
from policygrad.rewards.resolve import REWARDS, list_rewards
from policygrad.tasks.benchmarks import Benchmark, load_benchmarks
from policygrad.training.config.serialization import (
    algorithm_to_dict,
    list_parts,
    load_algorithm,
    parse_part,
    suggest_name,
)
from policygrad.utils.plugins import list_plugin_names
from policygrad.utils.user_code import find_assignment, find_definition, import_path, is_user_reference, load_object


def resolve_subject(name: str) -> Any:
    """Return a user's own algorithm, part or class of a part. Raises ConfigError for any other name."""
    if name.endswith(")"):
        return parse_part(None, name, "show", "part")
    if is_user_reference(name):
        custom = load_object(name, f"show {name}", (Algorithm, type))
        if isinstance(custom, Algorithm):
            return load_algorithm(name)
        if not (isinstance(custom, type) or is_dataclass(custom)):
            raise ConfigError(
                f"show {name}: {type(custom).__name__} is neither an algorithm nor a part. An algorithm is a "
                "policygrad.Algorithm(…); a part is a class with @dataclass(frozen=True)."
            )
        if problem := frozen_problem(custom if isinstance(custom, type) else type(custom)):
            raise ConfigError(f"show {name}: {problem}")
        return custom
    if name in LADDERS:
        raise ConfigError(
            f"{name!r} is a ladder of changes: policygrad compare --ladder {name} --dry-run lists its rows"
        )
    rewards = [reward.rstrip(":") for reward in list_rewards()]
    known = [*ALGORITHMS, *list_plugin_names("algorithm"), *list_parts(), *rewards, *load_benchmarks(), *LADDERS]
    hint = suggest_name(name, known)
    hint = hint if hint.startswith("did") else "`policygrad show` lists them; for your own write mine.py:NAME"
    raise ConfigError(f"there is no algorithm, part, reward, metric or benchmark {name!r}: {hint}")


def describe_subject(subject: Any, name: str) -> list[TextRow]:
    """Describe what `resolve_subject` returned."""
    if isinstance(subject, Algorithm):
        return [*describe_algorithm(subject), TextRow(()), TextRow((("Code  ", HEAD), (find_assignment(name), QUIET)))]
    return describe_part(subject, find_definition(subject if isinstance(subject, type) else type(subject)))


def subject_to_dict(subject: Any) -> dict[str, Any]:
    """Return the object that `show --json` prints about an algorithm, a part or its class."""
    if isinstance(subject, Algorithm):
        info = CATALOG.get(subject.name)
        return {
            "kind": "algorithm",
            "name": subject.name,
            "equation": dict(subject.equation()),
            "parts": algorithm_to_dict(subject),
            "info": None if info is None else asdict(info),
        }
    kind = subject if isinstance(subject, type) else type(subject)
    docs = read_field_docs(kind)
    return {
        "kind": "part",
        "name": kind.__name__,
        "places": [place for place, role in ROLES.items() if issubclass(kind, role.bases)],
        "text": inspect.getdoc(kind) or "",
        "settings": {f.name: docs.get(f.name, "") for f in fields(kind)},
        "used_by": _list_users(kind),
    }


FAMILIES = (
    "one sample at a time",
    "values of every token: a critic, or sampled",
    "samples of one prompt compared, on-policy",
    "samples of one prompt compared, a ratio per token, clipped",
    "samples of one prompt compared, a ratio per token, another gate",
    "samples of one prompt compared, a ratio per completion",
)


def classify_family(a: Algorithm) -> str:
    """Return the family of an algorithm, from its parts: where it takes credit from and how it weighs old samples."""
    single, values, group, clipped, gated, completion = FAMILIES
    if a.critic is not None or a.replaces_rows or any(link.samples_values for link in a.advantage):
        return values
    if not any(link.uses_group_statistics for link in a.advantage):
        return single
    if a.ratio is None:
        return group
    if not a.ratio.per_token:
        return completion
    return clipped if isinstance(a.gate, Clip) else gated


def group_by_family() -> dict[str, list[str]]:
    """Return the names of the matrix by family, without empty families."""
    result: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for name, a in ALGORITHMS.items():
        result[classify_family(a)].append(name)
    return {name: members for name, members in result.items() if members}


REWARD_OPTIONS = {"format": "REGEX", "model": "DIR|ID"}
"""What follows the colon of a reward whose reader has no docstring about it."""
_SYMBOLS = {"ratio": "r", "gate": "w", "corrections": "ρ", "aggregation": "c", "terms": "k", "critic": "V"}


def describe_part(part: Any, where: str) -> list[TextRow]:
    """Describe a part or its class: settings, equation, docstring, location of the code (`where`), algorithms that use it."""
    kind: type = part if isinstance(part, type) else type(part)
    built = part
    if isinstance(part, type):  # with its defaults, unless a setting has none
        needed = any(f.init and f.default is MISSING and f.default_factory is MISSING for f in fields(kind))
        built = None if needed else kind()
    rows = [TextRow(((kind.__name__ if built is None else format_part(built, names=True), NAME),))]
    # Its role, the command-line option and the location of the code.
    is_named = kind.__name__ in list_parts() and getattr(policygrad, kind.__name__) is kind
    option = kind.__name__ if is_named else import_path(kind)
    for place, role in ROLES.items():
        if issubclass(kind, role.bases):
            rows.append(TextRow((("  ", ""),), f"{role.noun}: --algorithm.{place} {option}"))
    if where:
        rows.append(TextRow((("  ", ""),), where, QUIET))
    rows.append(TextRow(()))
    if fields(kind):
        rows += [TextRow((("Settings", HEAD),)), *_describe_settings(kind, built), TextRow(())]
    if built is not None and isinstance(built, Part):
        place = next((place for place, role in ROLES.items() if isinstance(built, role.bases)), "")
        if isinstance(built, Advantage):
            lead, formula = "  Ψ ← ", append_link("R" if built.starts_chain else "Ψ", built)
        else:
            formula, symbol = built.formula, _SYMBOLS.get(place, "")
            lead = "  " if not symbol or re.match(rf"{symbol}(_\w+)? = ", formula) else f"  {symbol} = "
        rows += [TextRow((("Equation", HEAD),)), TextRow(((lead, ""),), formula), TextRow(())]
    for paragraph in re.split(r"\n\n+", inspect.getdoc(kind) or ""):
        lines = paragraph.split("\n")
        if any(re.search(r"\S {2,}\S", line) or line.startswith(" ") for line in lines):  # keep tables as they are
            rows += [TextRow(((f"  {line}", ""),)) for line in lines]
        else:
            rows.append(TextRow((("  ", ""),), " ".join(lines)))
        rows.append(TextRow(()))
    return [*rows, TextRow((("Used by  ", HEAD),), ", ".join(_list_users(kind)) or "none of the named algorithms")]


def _list_users(kind: type) -> list[str]:
    return [name for name, a in ALGORITHMS.items() if any(type(part) is kind for part in a.parts())]


def list_everything() -> list[TextRow]:
    """List every algorithm by family, and every part by its field with a summary."""
    rows = [TextRow((("Algorithms", HEAD), ("  policygrad show NAME", QUIET)))]
    for family, names in group_by_family().items():
        rows += [TextRow(((f"  {family}", ""),)), TextRow((("    ", ""),), ", ".join(names), NAME)]
    heading = "  policygrad show PART, policygrad train … --algorithm.FIELD PART"
    rows += [TextRow(()), TextRow((("Parts", HEAD), (heading, QUIET)))]
    longest = max(map(len, list_parts())) + 2
    for place, role in ROLES.items():
        symbol = EQUATION_COLUMNS.get(place, ("", place))[0]
        rows.append(TextRow(((f"  {place}", HEAD), (f"  {role.noun}{', ' * bool(symbol)}{symbol}", QUIET))))
        for name in list_parts(place):
            text = summarise_docstring(getattr(policygrad, name))[0]
            sentence = re.split(r"(?<=[\w\)\]’”])[.;](?=\s|$)", text)[0].strip().rstrip(".")
            rows.append(TextRow(((f"    {name:<{longest}}", NAME),), sentence))
    rows += [
        TextRow(()),
        TextRow((("Rewards", HEAD), ("  policygrad show REWARD, policygrad train … --reward REWARD", QUIET))),
    ]
    rows.append(TextRow((("    ", ""),), ", ".join(list_rewards()), NAME))
    rows += [
        TextRow(()),
        TextRow((("Benchmarks", HEAD), ("  policygrad show BENCHMARK, … --evaluation.benchmarks", QUIET))),
    ]
    rows.append(TextRow((("    ", ""),), ", ".join(load_benchmarks()), NAME))
    rows += [TextRow(()), TextRow((("Ladders of changes", HEAD), ("  policygrad compare --ladder LADDER", QUIET)))]
    rows.append(TextRow((("    ", ""),), ", ".join(LADDERS), NAME))
    rows.append(TextRow(()))
    rows.append(
        TextRow((("Metrics", HEAD), ("  policygrad show METRIC, such as kl; docs/metrics.md lists them", QUIET)))
    )
    hint = "user-defined parts: policygrad show mine.py:PART, or mine:PART"
    return [*rows, TextRow(()), TextRow(((hint, QUIET),))]


def _describe_settings(kind: type, built: Any) -> Iterator[TextRow]:
    docs, named = read_field_docs(kind), list[tuple[str, str]]()
    for f in fields(kind):
        signature = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
        if built is not None or f.default is not MISSING:
            value = f.default if built is None else getattr(built, f.name)
            signature += f" = {value!r}" if isinstance(value, str) else f" = {shorten_number(value)}"
        named.append((f.name, signature))
    name, size = (max(len(pair[i]) for pair in named) for i in (0, 1))
    for setting, signature in named:
        yield TextRow(((f"  {setting:<{name}}  ", NAME), (f"{signature:<{size}}  ", "")), docs.get(setting, ""))


def describe_reward(name: str) -> list[TextRow]:
    """Describe a reward of policygrad's own: how it is named, its options, and what it scores."""
    row, text = REWARDS[name], _read_reward_doc(name)
    rows = [TextRow(((name, NAME), ("  a reward", QUIET))), TextRow(())]
    if not row.needs_options:
        rows.append(TextRow(((f"  --reward {name}", NAME),)))
    if row.options:
        rows.append(TextRow(((f"  --reward '{name}:{_read_reward_options(name)}'", NAME),)))
    rows.append(TextRow(()))
    for paragraph in text.split("\n\n"):
        rows += [TextRow((("  ", ""),), " ".join(paragraph.split())), TextRow(())]
    more = "weights, bounds and gates: --reward '0.5*math within 0..1 if format'; your own: --reward mine.py:function"
    return [*rows, TextRow(((more, QUIET),))]


def reward_to_dict(name: str) -> dict[str, Any]:
    """Return the object that `show --json` prints about a reward."""
    row = REWARDS[name]
    options = _read_reward_options(name) if row.options else ""
    return {
        "kind": "reward",
        "name": name,
        "text": _read_reward_doc(name),
        "options": options,
        "needs_options": row.needs_options,
    }


def _read_reward_doc(name: str) -> str:
    row = REWARDS[name]
    where = row.plain or re.sub(r"(:\w+)\.\w+$", r"\1", row.options)  # of the class that makes it
    return inspect.getdoc(load_object(where, f"reward {name!r}")) or ""


def _read_reward_options(name: str) -> str:
    """Return what may follow the colon, from the docstring of what reads it; "…" if that does not say."""
    module, _, path = REWARDS[name].options.partition(":")
    reader: Any = import_module(module)
    for attribute in path.split("."):
        reader = getattr(reader, attribute)
    found = re.findall(r"`([^`]+)`", inspect.getdoc(reader) or "") if not isinstance(reader, type) else []
    return found[0] if found else REWARD_OPTIONS.get(name, "…")


def describe_benchmark(benchmark: Benchmark) -> list[TextRow]:
    """Describe a known benchmark: its data, settings, prompt, and where each choice comes from."""
    s = benchmark.sampling
    data = f"{benchmark.repository}{f' ({benchmark.config})' * bool(benchmark.config)}, split {benchmark.split}, "
    facts = {
        "Is": f"{benchmark.title}, {benchmark.problems:,} problems",
        "Data": f"{data}revision {benchmark.revision}; {', '.join(benchmark.columns)}",
        "Licence": benchmark.licence,
        "Sampling": f"{s.samples} per problem, temperature {s.temperature:g}, top-p {s.top_p:g}, up to {s.max_tokens} tokens",
        "Grader": ", ".join([benchmark.reward, *(metric.reward for metric in benchmark.metrics)]),
        "Differs": benchmark.differs,
    }
    return [
        TextRow(((benchmark.name, NAME), ("  a benchmark", QUIET))),
        TextRow(()),
        *(TextRow(((f"{label:<10}", HEAD),), text) for label, text in facts.items()),
        TextRow(()),
        TextRow((("Prompt", HEAD),)),
        *(TextRow(((f"  {line}", ""),)) for line in benchmark.prompt.split("\n")),
        TextRow(()),
        TextRow((("Sources", HEAD),)),
        *(TextRow(((f"  {name:<9}", QUIET),), source) for name, source in benchmark.sources.items()),
    ]
