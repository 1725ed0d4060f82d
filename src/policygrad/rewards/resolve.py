"""From a name to a reward: built-ins, `package.module.function`, `path/to/file.py:function`, or the function itself."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from policygrad.errors import ConfigError
from policygrad.rewards.base import Reward, RewardFunction
from policygrad.utils.user_code import FileFunction, import_function, load_object


def list_rewards() -> list[str]:
    """Return the names of the built-in rewards, sorted; one that needs something after a colon ends with it, `judge:`.

    `format:REGEX` takes a pattern, `gsm8k:POLICY,POLICY` and `math:…` choose where the answer is looked for,
    `code:OPTION=VALUE,…` limits programs, `ifeval:OPTION=VALUE,…` chooses one of its accuracies,
    `length_penalty:max_length=400` sets the length; `model:PATH` is a reward model,
    `judge:RUBRIC,model=NAME,url=…` a language model as judge; `verl:FILE`, `openrlhf:FILE` and `trl:FILE:NAME` are
    functions written for these libraries.
    """
    return sorted(f"{name}:" if row.needs_options else name for name, row in REWARDS.items())


def resolve_reward(name: str | Reward | RewardFunction) -> Reward:
    """Return the reward of a name, with its weight, bounds and gates: `0.5*math within 0..1 if format` (`parse_reward`).

    A Reward or a function is accepted in place of a name.

    Raises:
        ConfigError: An unknown name, or a failed import; with the remedy.
    """
    if isinstance(name, Reward):
        return name
    if callable(name):
        return _create_reward(getattr(name, "__name__", type(name).__name__), name)
    if not isinstance(name, str):
        raise ConfigError(f"a reward is a name or a function, got {type(name).__name__}")
    spec = parse_reward(name)
    reward, *gates = (_create_reward(part, _load_function(part)) for part in spec.names)
    if gates or spec.low > -math.inf or spec.high < math.inf:
        from policygrad.rewards.gated import GatedReward

        reward = _create_reward(spec.title, GatedReward(reward, tuple(gates), spec.low, spec.high))
    return replace(reward, weight=spec.weight)


@dataclass(frozen=True)
class RewardRow:
    """A reward of policygrad's own."""

    plain: str = ""
    """module:NAME of the function without options, or of a class that makes it; "" = it is `options("")`, or needs some."""
    options: str = ""
    """module:NAME of what is called with the text after the colon; "" = it takes none."""
    needs_options: bool = False
    check: str = ""
    """module:NAME of what raises ConfigError where the reward cannot be computed."""


REWARDS = {
    "choice": RewardRow("policygrad.rewards.builtin:choice"),
    "code": RewardRow(options="policygrad.rewards.code:Code.from_options"),
    "exact_match": RewardRow("policygrad.rewards.builtin:exact_match"),
    "format": RewardRow("policygrad.rewards.builtin:Format", "policygrad.rewards.builtin:Format"),
    "gsm8k": RewardRow("policygrad.rewards.math:gsm8k", "policygrad.rewards.math:Gsm8k.from_options"),
    "ifeval": RewardRow(
        "policygrad.rewards.instructions:ifeval",
        "policygrad.rewards.instructions:IFEval.from_options",
        check="policygrad.rewards.instructions:check_langdetect_installed",
    ),
    "judge": RewardRow(options="policygrad.rewards.llm_judge:LLMJudge.from_options", needs_options=True),
    "length_penalty": RewardRow(options="policygrad.rewards.builtin:LengthPenalty.from_options", needs_options=True),
    "math": RewardRow(
        "policygrad.rewards.math:math",
        "policygrad.rewards.math:Math.from_options",
        check="policygrad.rewards.math:check_math_verify_installed",
    ),
    "model": RewardRow(options="policygrad.rewards.reward_model:ModelReward.from_name", needs_options=True),
    "openrlhf": RewardRow(options="policygrad.rewards.foreign:OpenRLHFReward.load", needs_options=True),
    "reasoning_gym": RewardRow("policygrad.rewards.builtin:reasoning_gym"),
    "reasoning_gym_partial": RewardRow("policygrad.rewards.builtin:reasoning_gym_partial"),
    "repetition_penalty": RewardRow(
        "policygrad.rewards.builtin:RepetitionPenalty",
        "policygrad.rewards.builtin:RepetitionPenalty.from_options",
    ),
    "trl": RewardRow(options="policygrad.rewards.foreign:TRLReward.load", needs_options=True),
    "verl": RewardRow(options="policygrad.rewards.foreign:VerlReward.load", needs_options=True),
    "worked_steps": RewardRow("policygrad.rewards.builtin:worked_steps"),
}
FOREIGN = {"verl": "compute_score", "openrlhf": "reward_func", "trl": ""}
"""Other libraries whose functions are rewards, and the name that a function has there by default; "" = it has none."""
OPENAI_URL = "https://api.openai.com/v1"
_LOCALHOST = ("localhost", "127.0.0.1", "::1")
_DOTTED = re.compile(r"\w+(\.\w+)+")


def _create_reward(name: str, function: RewardFunction) -> Reward:
    return Reward(name, function, **getattr(function, "reward_options", {}))


def _load_function(name: str) -> RewardFunction:
    kind, colon, options = name.partition(":")
    row = REWARDS.get(kind)
    if row is not None and (row.options or not colon):
        if row.check:
            load_object(row.check, f"reward {name!r}")()
        if row.plain and not colon:
            plain = load_object(row.plain, f"reward {name!r}")
            return plain() if isinstance(plain, type) else plain  # type: ignore[no-any-return]
        function: RewardFunction = load_object(row.options, f"reward {name!r}")(options)
        if (check := getattr(function, "check_machine", None)) is not None:
            check()
        return function
    path, colon, attribute = name.rpartition(":")
    if colon and path.endswith(".py") and (":" not in path or Path(path).is_file()):
        return FileFunction(str(Path(path).resolve()), attribute)
    if _DOTTED.fullmatch(name):
        return import_function(name)
    similar = difflib.get_close_matches(f"{kind}:" if ":" in name else name, list_rewards(), n=1, cutoff=0.4)
    hint = f"did you mean {similar[0]!r}?" if similar else f"the built-in ones are {', '.join(list_rewards())}."
    raise ConfigError(
        f"unknown reward {name!r}: {hint} A function of yours is package.module.function or path/to/file.py:function"
    )


def split_location(kind: str, name: str) -> tuple[str, str]:
    """Return (file or module, function) of a function of another library's kind."""
    if name.endswith(".py"):
        return name, FOREIGN[kind]
    file, colon, function = name.rpartition(":")
    return (file, function) if colon else (name.rpartition(".")[0], name.rpartition(".")[2])


def find_code(name: str) -> tuple[str, ...]:
    """Return the modules and files that a reward's name would import, and the remote servers that it would send texts to.

    Imports nothing. Empty where everything is policygrad's own.
    """
    return tuple(place for part in parse_reward(name).names if (place := _find_code(part)))


def _find_code(name: str) -> str | None:
    if name.startswith("judge:"):
        options = {key.strip(): url.strip() for key, _, url in (part.partition("=") for part in name.split(","))}
        url = options.get("url") or OPENAI_URL
        return None if is_local_url(url) else url
    kind, _, location = name.partition(":")
    if kind in FOREIGN:
        return split_location(kind, location)[0]
    if _is_built_in(name):
        return None
    path, colon, _ = name.rpartition(":")
    if colon and path.endswith(".py"):
        return path
    return name.rpartition(".")[0] if _DOTTED.fullmatch(name) else None


def _is_built_in(name: str) -> bool:
    row = REWARDS.get(name.partition(":")[0])
    return row is not None and bool(row.options or ":" not in name)


def find_rubrics(name: str) -> tuple[str, ...]:
    """Return the rubric files of the judges in a reward's name."""
    judges = (part.removeprefix("judge:") for part in parse_reward(name).names if part.startswith("judge:"))
    return tuple(options.partition(",")[0].strip().removeprefix("rubric=") for options in judges)


def is_local_url(url: str) -> bool:
    """Return whether a URL is on this machine, however it is parsed: one with a user name or a backslash is not."""
    try:
        return urlsplit(url).hostname in _LOCALHOST and not set("@\\") & set(url)
    except ValueError:
        return False


# A reward's name with its files looked up in another folder than the current one.

PathResolver = Callable[[str], str]  # maps a file or folder, as it is named, to its path


def resolve_paths(name: str, resolve_path: PathResolver) -> str:
    """Return the reward's name with resolved file paths; weight, bounds and gates stay as they are written."""
    resolved, unread = "", name
    for part in parse_reward(name).names:
        before, _, unread = unread.partition(part)
        kind, colon, location = part.partition(":")
        start = len(kind) + 1
        if kind == "judge":
            file = location.partition(",")[0]
        elif kind == "model":
            file = location
        elif kind in FOREIGN:
            file = split_location(kind, location)[0]
        else:
            start, file = 0, part.rpartition(":")[0]
        if colon and (kind in ("judge", "model") or file.endswith(".py")):
            part = part[:start] + resolve_path(file) + part[start + len(file) :]
        resolved += before + part
    return resolved + unread


def resolve_with_paths(name: str, resolve_path: PathResolver) -> Reward:
    """Return the reward, loaded from its resolved paths, under the name that was given: metrics are named after it."""
    return replace(resolve_reward(resolve_paths(name, resolve_path)), name=parse_reward(name).title)


# The grammar: `0.5*math within 0..1 if format and mine.py:short`.
#
#     SPEC = [WEIGHT*] NAME [*WEIGHT] [within LOW..HIGH] [if NAME [and NAME ...]]
#
# A name may hold a pattern, which may hold anything: what looks like the end of a spec is the end, and never a part of the
# pattern. A pattern that really ends so goes into brackets: `format:(?:a*2)`, `format:x[ ]if math`.

_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_WEIGHT_BEFORE = re.compile(rf"\s*({_NUMBER})\s*\*\s*(?=\S)")
_WEIGHT_AFTER = re.compile(rf"(?<!\\)((?:\\\\)*)\s*\*\s*({_NUMBER})\s*\Z")  # an escaped star is part of the pattern
_WITHIN = re.compile(rf"\s+within\s+({_NUMBER})?\.\.({_NUMBER})?\s*\Z")
_IF, _AND = re.compile(r"\s+if\s+"), re.compile(r"\s+and\s+")
_USE_BRACKETS = "a pattern that ends so goes into brackets, format:(?:…)"


@dataclass(frozen=True)
class RewardSpec:
    """A parsed reward."""

    name: str
    weight: float = 1.0
    low: float = -math.inf
    high: float = math.inf
    gates: tuple[str, ...] = ()  # names of rewards that must be above 0 for this one to count

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all functions it calls."""
        return (self.name, *self.gates)

    @property
    def title(self) -> str:
        """The text without its weight."""
        low, high = ("" if math.isinf(end) else f"{end:g}" for end in (self.low, self.high))
        within = f" within {low}..{high}" if low or high else ""
        return self.name + within + (f" if {' and '.join(self.gates)}" if self.gates else "")


def parse_reward(text: str) -> RewardSpec:
    """Parse a reward. Raises ConfigError for two weights, empty bounds, and gates with weights, bounds or gates of their own."""
    name, gates = text.strip(), tuple[str, ...]()
    for split in _IF.finditer(name):  # the first `if` that is followed by a reward starts the gates
        rest = name[split.end() :].strip()
        if not _starts_with_reward(rest):
            continue
        ands = [match.span() for match in _AND.finditer(rest) if _starts_with_reward(rest[match.end() :].strip())]
        starts, ends = [0, *(end for _, end in ands)], [*(start for start, _ in ands), len(rest)]
        gates = tuple(rest[start:end].strip() for start, end in zip(starts, ends, strict=True))
        for gate in gates:
            gated = any(_starts_with_reward(gate[inner.end() :].strip()) for inner in _IF.finditer(gate))
            if gated or _WEIGHT_AFTER.search(gate) or _WEIGHT_BEFORE.match(gate) or _WITHIN.search(gate):
                raise ConfigError(
                    f"reward {text!r}: the gate {gate!r} holds or does not, so it has no weight, bounds or gate of its own: "
                    f"write `NAME if GATE and GATE`; {_USE_BRACKETS}"
                )
        name = name[: split.start()]
        break
    weights = []
    if before := _WEIGHT_BEFORE.match(name):
        name, weights = name[before.end() :], [float(before[1])]
    name, after = _strip_end(_WEIGHT_AFTER, name)
    name, within = _strip_end(_WITHIN, name)
    if within and not after:
        name, after = _strip_end(_WEIGHT_AFTER, name)
    if after:
        name, weights = name + after[1], [*weights, float(after[2])]
    if len(weights) > 1:
        raise ConfigError(
            f"reward {text!r} has two weights, {weights[0]:g} and {weights[1]:g}: drop one; {_USE_BRACKETS}"
        )
    low, high = -math.inf, math.inf
    if within:
        low, high = float(within[1] or low), float(within[2] or high)
        if not low < high or (within[1] is None and within[2] is None):
            raise ConfigError(f"reward {text!r}: within LOW..HIGH needs LOW below HIGH, or one of them: within ..1")
    return RewardSpec(name.strip(), weights[0] if weights else 1.0, low, high, gates)


def _starts_with_reward(text: str) -> bool:
    """Return whether a text starts with a reward's name, perhaps with the weight that a gate cannot have."""
    text, _ = _strip_end(_WITHIN, _strip_end(_WEIGHT_AFTER, _WEIGHT_BEFORE.sub("", text, count=1))[0])
    text, _ = _strip_end(_WEIGHT_AFTER, text)
    names = (text, _AND.split(text)[0])
    return any((_is_built_in(n) and f"{n}:" not in list_rewards()) or _find_code(n) is not None for n in names)


def _strip_end(end: re.Pattern[str], text: str) -> tuple[str, re.Match[str] | None]:
    match = end.search(text)
    return (text[: match.start()], match) if match else (text, None)
