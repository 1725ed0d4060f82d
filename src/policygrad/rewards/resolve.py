"""From a name to a reward: built-ins, `package.module.function`, `path/to/file.py:function`, or the function itself."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from policygrad.errors import ConfigError, RewardError
from policygrad.rewards import builtin, code
from policygrad.rewards import math as math_rewards
from policygrad.rewards.base import Reward, RewardFunction, find_option
from policygrad.rewards.builtin import Format, LengthPenalty, RepetitionPenalty, exact_match, worked_steps
from policygrad.rewards.workers.messages import RewardCaller, SampleResult, Signature, build_signature
from policygrad.utils.user_code import FileFunction, import_function

# A reward as one writes it: `0.5*math within 0..1 if format and mine.py:short`.
#
#     SPEC = [WEIGHT*] NAME [*WEIGHT] [within LOW..HIGH] [if NAME [and NAME ...]]
#
# A name may hold a pattern, which may hold anything: what looks like the end of a spec is the end, and never a part of the
# pattern. A pattern that really ends so goes into brackets: `format:(?:a*2)`, `format:x[ ]if math`.

_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_BEFORE = re.compile(rf"\s*({_NUMBER})\s*\*\s*(?=\S)")
_AFTER = re.compile(
    rf"(?<!\\)((?:\\\\)*)\s*\*\s*({_NUMBER})\s*\Z"
)  # a star behind a backslash is a letter of the pattern
_WITHIN = re.compile(rf"\s+within\s+({_NUMBER})?\.\.({_NUMBER})?\s*\Z")
_IF, _AND = re.compile(r"\s+if\s+"), re.compile(r"\s+and\s+")
_BRACKETS = "a pattern that ends so goes into brackets, format:(?:…)"
NameTest = Callable[[str], bool]
"""Whether a text may be the name of a reward; nothing is imported for that."""


@dataclass(frozen=True)
class RewardSpec:
    """What a text says of a reward."""

    name: str
    weight: float = 1.0
    low: float = -math.inf
    high: float = math.inf
    gates: tuple[str, ...] = ()
    """Names of the rewards without which it does not count."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all functions that it takes."""
        return (self.name, *self.gates)

    @property
    def plain(self) -> bool:
        """Whether the function's own value is what counts."""
        return not self.gates and self.low == -math.inf and self.high == math.inf

    @property
    def title(self) -> str:
        """What it is called: all of it but its weight."""
        low, high = ("" if math.isinf(end) else f"{end:g}" for end in (self.low, self.high))
        within = f" within {low}..{high}" if low or high else ""
        return self.name + within + (f" if {' and '.join(self.gates)}" if self.gates else "")


def parse_reward(text: str, is_name: NameTest) -> RewardSpec:
    """Raises ConfigError for two weights, bounds that bound nothing, and gates with weights or gates of their own."""
    rest, gates = _gates(text.strip(), is_name)
    weights = []
    if found := _BEFORE.match(rest):
        rest, weights = rest[found.end() :], [float(found[1])]
    rest, after = _without(_AFTER, rest)
    rest, within = _without(_WITHIN, rest)
    if within and not after:
        rest, after = _without(_AFTER, rest)
    if after:
        rest, weights = rest + after[1], [*weights, float(after[2])]
    if len(weights) > 1:
        raise ConfigError(
            f"reward {text!r} has two weights, {weights[0]:g} and {weights[1]:g}: leave one away; {_BRACKETS}"
        )
    low, high = _bounds(text, within[1], within[2]) if within else (-math.inf, math.inf)
    return RewardSpec(rest.strip(), weights[0] if weights else 1.0, low, high, gates)


def _gates(text: str, known: NameTest) -> tuple[str, tuple[str, ...]]:
    """(the text before them, the names): the first `if` behind which a reward is named."""
    for found in _IF.finditer(text):
        behind = text[found.end() :].strip()
        if not _begins(behind, known):
            continue
        names = _split(behind, known)
        for name in names:
            if _AFTER.search(name) or _BEFORE.match(name) or _WITHIN.search(name) or _splits(_IF, name, known):
                raise ConfigError(
                    f"reward {text!r}: a gate, {name!r}, holds or it does not, so it has no weight, bounds or gate of its own: "
                    f"write `NAME if GATE and GATE`; {_BRACKETS}"
                )
        return text[: found.start()], names
    return text, ()


def _split(text: str, known: NameTest) -> tuple[str, ...]:
    """`NAME and NAME` as names."""
    cuts = _splits(_AND, text, known)
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    return tuple(text[start:end].strip() for start, end in zip(starts, ends, strict=True))


def _splits(word: re.Pattern[str], text: str, known: NameTest) -> list[tuple[int, int]]:
    return [found.span() for found in word.finditer(text) if _begins(text[found.end() :].strip(), known)]


def _begins(text: str, known: NameTest) -> bool:
    """Whether a reward is named here, be it with a weight that it may not have."""
    text, _ = _without(_WITHIN, _without(_AFTER, _BEFORE.sub("", text, count=1))[0])
    text, _ = _without(_AFTER, text)
    return known(text) or known(_AND.split(text)[0])


def _without(end: re.Pattern[str], text: str) -> tuple[str, re.Match[str] | None]:
    found = end.search(text)
    return (text[: found.start()], found) if found else (text, None)


def _bounds(text: str, low: str | None, high: str | None) -> tuple[float, float]:
    least, most = float(low or -math.inf), float(high or math.inf)
    if not least < most or (low is None and high is None):
        raise ConfigError(f"reward {text!r}: within LOW..HIGH needs LOW below HIGH, or one of them: within ..1")
    return least, most


# A reward that counts only where gates hold, and no more than it may: what others say, looked at before and after it.

Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class GatedReward:
    """The inner reward's value, not below `low` or above `high`, where every gate holds; 0 where one does not.

    A gate holds where its value is above 0, and where it does not apply (None); where it fails, the sample fails. Gates are asked
    first, and the inner function only about what passes: a judge that is paid for is not asked about text of the wrong form.
    """

    inner: Reward
    gates: tuple[Reward, ...] = ()
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        for part in self._parts:
            if part.process_reward:
                raise ConfigError(
                    f"reward {part.name!r} scores steps: gates and bounds are for what scores whole completions, and so are they"
                )

    @property
    def _parts(self) -> tuple[Reward, ...]:
        return (*self.gates, self.inner)

    @property
    def reward_options(self) -> dict[str, Any]:
        """Those of what it is made of, the widest: the whole batch where one of them wants that, and the longest budget."""
        budgets = [part.timeout for part in self._parts if part.timeout is not None]
        return {
            "batched": any(part.batched for part in self._parts),
            "alone": any(part.dedicated_worker for part in self._parts),
            "budget": max(budgets, default=None),
        }

    @property
    def reward_network(self) -> bool:
        """Whether a part asks a server."""
        return any(getattr(part.function, "reward_network", False) for part in self._parts)

    def reward_prepare(self) -> None:
        """What each part prepares."""
        for part in self._parts:
            prepare: Callable[[], object] | None = getattr(part.function, "reward_prepare", None)
            if prepare is not None:
                prepare()

    @property
    def extract_answer(self) -> Any:
        """The answer that the inner reward reads."""
        return getattr(self.inner.function, "voted", None)

    @property
    def __signature__(self) -> inspect.Signature:
        """The columns that its parts need."""
        return build_signature(name for part in self._parts for name in Signature.from_function(part.function).required)

    @cached_property
    def _callers(self) -> tuple[RewardCaller, ...]:
        return tuple(RewardCaller(part.name, part.function) for part in self._parts)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[Any]:
        """One SampleResult per completion; the reason of a failure is that of the part that failed."""
        said: list[SampleResult | None] = [None] * len(completions)
        for part, caller in zip(self._parts, self._callers, strict=True):
            open_ = [i for i, known in enumerate(said) if known is None]
            judgements = _ask(caller, part.batched, open_, prompts, completions, columns)
            for place, judgement in zip(open_, judgements, strict=True):
                said[place] = self._bounded(judgement) if part is self.inner else _stopped(judgement)
        return [judgement for judgement in said if judgement is not None]

    def _bounded(self, judgement: SampleResult) -> SampleResult:
        value = judgement.value
        return judgement if value is None else replace(judgement, value=min(max(value, self.low), self.high))


def _stopped(gate: SampleResult) -> SampleResult | None:
    """What is said of a completion at this gate; None = it passes."""
    if gate.reason is not None:
        return gate
    return None if gate.value is None or gate.value > 0 else SampleResult(0.0)


def _ask(
    caller: RewardCaller,
    batched: bool,
    places: Sequence[int],
    prompts: Sequence[Any],
    texts: Sequence[str],
    columns: Columns,
) -> list[SampleResult]:
    """What a function says of these places, all at once or one at a time, as it is used to."""
    calls = [places] if batched and places else [[place] for place in places]
    return [
        judgement
        for some in calls
        for judgement in caller(
            [prompts[i] for i in some],
            [texts[i] for i in some],
            {name: [values[i] for i in some] for name, values in columns.items()},
        )
    ]


# Reward functions with the signatures of verl and OpenRLHF, as they are: `verl:mine.py`, `openrlhf:reward_func.py`.
#
# Sources: verl, docs/preparation/reward_function.rst ("Customized"), and its reward managers for what may be returned; OpenRLHF,
# README, "Single-Turn Agent: Reinforced Fine-tuning with Custom Rewards" (--remote_rm_url FILE).

DEFAULT_FUNCTION_NAMES = {"verl": "compute_score", "openrlhf": "reward_func"}
"""What each looks for in a file."""


@dataclass(frozen=True)
class VerlReward:
    """`compute_score(data_source, solution_str, ground_truth, extra_info)` → a number, or a dict with `score` (older: `reward`).

    ground_truth is the column `reward_model`'s, or `answer`; data_source and extra_info are the columns of these names, or None.
    It may be async.
    """

    function: RewardFunction

    @property
    def reward_prepare(self) -> Any:
        return getattr(self.function, "reward_prepare", None)

    def __call__(self, prompts: Any, completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
        found: list[Any] = [
            self.function(
                data_source=row.get("data_source"),
                solution_str=text,
                ground_truth=_truth(row),
                extra_info=row.get("extra_info"),
            )
            for text, row in zip(completions, rows, strict=True)
        ]
        if any(inspect.isawaitable(said) for said in found):
            return _awaited(found)
        return [_score(said) for said in found]


@dataclass(frozen=True)
class OpenRLHFReward:
    """`reward_func(queries, prompts, labels)` → a tensor or list of rewards, or a dict with `rewards`.

    queries are prompts with their completions behind them, labels the column `answer` (--label_key there), lists of one. The prompt
    of a chat is what its messages say, a line each: the model's template is not known here.
    """

    function: RewardFunction

    @property
    def reward_prepare(self) -> Any:
        return getattr(self.function, "reward_prepare", None)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        asked = [_text(prompt) for prompt in prompts]
        queries = [prompt + text for prompt, text in zip(asked, completions, strict=True)]
        labels = list(columns.get("answer", [None] * len(queries)))
        said: Any = self.function(queries=queries, prompts=asked, labels=labels)
        return said["rewards"] if isinstance(said, Mapping) else said


def load_foreign_reward(kind: str, name: str) -> RewardFunction:
    """The adapter around `FILE.py`, `FILE.py:NAME` or `package.module.NAME`. Raises ConfigError."""
    if not name:
        raise ConfigError(
            f"reward '{kind}:' names no function: {kind}:mine.py, {kind}:mine.py:{DEFAULT_FUNCTION_NAMES[kind]}"
        )
    file, function = split_location(kind, name)
    found = FileFunction.load(str(Path(file).resolve()), function) if file.endswith(".py") else import_function(name)
    return VerlReward(found) if kind == "verl" else OpenRLHFReward(found)


def split_location(kind: str, name: str) -> tuple[str, str]:
    """(file or module, function)."""
    if name.endswith(".py"):
        return name, DEFAULT_FUNCTION_NAMES[kind]
    file, colon, function = name.rpartition(":")
    return (file, function) if colon else (name.rpartition(".")[0], name.rpartition(".")[2])


def _truth(row: Mapping[str, Any]) -> Any:
    model = row.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    if "answer" not in row:
        raise RewardError("verl's functions are given a ground_truth, and the task has neither reward_model nor answer")
    return row["answer"]


async def _awaited(found: Sequence[Awaitable[Any] | Any]) -> list[Any]:
    return [_score(said) for said in await asyncio.gather(*(_one(said) for said in found))]


async def _one(said: Any) -> Any:
    return await said if inspect.isawaitable(said) else said


def _score(said: Any) -> Any:
    if not isinstance(said, Mapping):
        return said
    return said["score"] if "score" in said else said["reward"]


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "".join(f"{message.get('content') or ''}\n" for message in prompt)


_BUILTIN: dict[str, RewardFunction] = {
    "code": code.code,
    "exact_match": exact_match,
    "format": Format(),
    "gsm8k": math_rewards.gsm8k,
    "math": math_rewards.math,
    "reasoning_gym": builtin.reasoning_gym,
    "reasoning_gym_partial": builtin.reasoning_gym_partial,
    "repetition_penalty": RepetitionPenalty(),
    "worked_steps": worked_steps,
}
_PRESETS: dict[str, Callable[[str], RewardFunction]] = {
    "code": lambda options: _walled(code.Code.from_options(options)),
    "format": Format,
    "gsm8k": lambda options: math_rewards.Gsm8k(_words(options)),
    "judge": lambda options: _judge(options),
    "length_penalty": LengthPenalty.from_options,
    "math": lambda options: math_rewards.Math(_words(options)),
    "model": lambda path: _reward_model(path),
    "openrlhf": lambda name: load_foreign_reward("openrlhf", name),
    "repetition_penalty": RepetitionPenalty.from_options,
    "verl": lambda name: load_foreign_reward("verl", name),
}
"""What takes words behind a colon."""
OPENAI_URL = "https://api.openai.com/v1"
_HERE = ("localhost", "127.0.0.1", "::1")
_DOTTED = re.compile(r"\w+(\.\w+)+")


def list_rewards() -> list[str]:
    """Names of the built-in rewards, sorted.

    `format:REGEX` takes a pattern of your own, `gsm8k:POLICY,POLICY` and `math:…` say where the answer is looked for,
    `code:OPTION=VALUE,…` what a program may take, `length_penalty:longest=400` what is too long; `model:PATH` is a reward model,
    `judge:RUBRIC,model=NAME,url=…` a language model that is asked; `verl:FILE` and `openrlhf:FILE` take those functions.
    """
    return sorted(_BUILTIN)


def resolve_reward(name: str | Reward | RewardFunction) -> Reward:
    """The reward called `name`, with an optional weight, bounds and gates: `0.5*math within 0..1 if format` (`spec.py`).

    Raises ConfigError for an unknown name and for what cannot be imported, with the way out. A Reward or a function is accepted in
    a name's place.
    """
    if isinstance(name, Reward):
        return name
    if callable(name):
        return _reward(getattr(name, "__name__", type(name).__name__), name, 1.0)
    if not isinstance(name, str):
        raise ConfigError(f"a reward is a name or a function, got {type(name).__name__}")
    spec = parse_reward(name, is_known_reward)
    if spec.plain:
        return _reward(spec.name, _function(spec.name), spec.weight)
    inner, *gates = (_reward(part, _function(part), 1.0) for part in spec.names)
    return _reward(spec.title, GatedReward(inner, tuple(gates), spec.low, spec.high), spec.weight)


def find_code(name: str) -> tuple[str, ...]:
    """The modules and files that a reward's name would import, and the servers elsewhere that it would show texts to; none where
    all is policygrad's own. Imports nothing."""
    return tuple(code for part in parse_reward(name, is_known_reward).names if (code := _code_of(part)))


def find_rubrics(name: str) -> tuple[str, ...]:
    """The files that say to judges what is good."""
    judges = (
        part.removeprefix("judge:") for part in parse_reward(name, is_known_reward).names if part.startswith("judge:")
    )
    return tuple(rest.partition(",")[0].strip().removeprefix("rubric=") for rest in judges)


def is_local_url(address: str) -> bool:
    """Whether an address is one of this machine, in whatever way it is read: one with a user's name or a backslash is not."""
    try:
        return urlsplit(address).hostname in _HERE and not set("@\\") & set(address)
    except ValueError:
        return False


def _code_of(name: str) -> str | None:
    if name.startswith("judge:"):
        address = find_option(name, "url") or OPENAI_URL
        return None if is_local_url(address) else address
    kind, _, rest = name.partition(":")
    if kind in DEFAULT_FUNCTION_NAMES:
        return split_location(kind, rest)[0]
    if name in _BUILTIN or kind in _PRESETS:
        return None
    path, colon, _ = name.rpartition(":")
    if colon and path.endswith(".py"):
        return path
    return name.rpartition(".")[0] if _DOTTED.fullmatch(name) else None


def is_known_reward(text: str) -> bool:
    """Whether a text may be the name of a reward; nothing is imported for that."""
    prefix, colon, _ = text.partition(":")
    return text in _BUILTIN or bool(colon and prefix in _PRESETS) or _code_of(text) is not None


def _reward(name: str, function: RewardFunction, weight: float) -> Reward:
    return Reward(name, function, weight, **getattr(function, "reward_options", {}))


def _words(options: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in options.split(",") if word.strip())


def _walled(programs: code.Code) -> RewardFunction:
    programs.reward_prepare()
    return programs


def _reward_model(path: str) -> RewardFunction:
    from policygrad.rewards.reward_model import ModelReward  # which imports torch

    return ModelReward.from_name(path)


def _judge(options: str) -> RewardFunction:
    from policygrad.rewards.llm_judge import LLMJudge  # which few runs have

    return LLMJudge.from_options(options)


def _function(name: str) -> RewardFunction:
    preset, colon, options = name.partition(":")
    if preset == "math":
        math_rewards.check_math_verify_installed()
    if preset == "code" or (preset in _PRESETS and (colon or name not in _BUILTIN)):
        return _PRESETS[preset](options)
    if name in _BUILTIN:
        return _BUILTIN[name]
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return FileFunction.load(str(Path(path).resolve()), function)
    if _DOTTED.fullmatch(name):
        return import_function(name)
    near = difflib.get_close_matches(name, list_rewards(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"the built-in ones are {', '.join(list_rewards())}."
    raise ConfigError(
        f"unknown reward {name!r}: {hint} Your own is package.module.function or path/to/file.py:function"
    )


# A reward's name, `0.5*mine.py:f if judge:good.md`, with its files looked up in another folder than the current one.

PathResolver = Callable[[str], str]
"""From a file or folder as it is named to where it is."""


def resolve_paths(name: str, find: PathResolver) -> str:
    """The same reward with every file that `find` knows by its whole path; weight, bounds and gates stay as they are written."""
    done, rest = "", name
    for part in parse_reward(name, is_known_reward).names:
        before, _, after = rest.partition(part)
        done, rest = done + before + _part(part, find), after
    return done + rest


def resolve_with_paths(name: str, find: PathResolver) -> Reward:
    """The reward, from where its files are, under the name that was given: metrics are called after it."""
    return replace(resolve_reward(resolve_paths(name, find)), name=parse_reward(name, is_known_reward).title)


def _part(part: str, find: PathResolver) -> str:
    kind, colon, rest = part.partition(":")
    if not colon:
        return part
    if kind == "model":
        return f"model:{find(rest)}"
    if kind == "judge":
        rubric, comma, options = rest.partition(",")
        return f"judge:{find(rubric)}{comma}{options}"
    if kind in DEFAULT_FUNCTION_NAMES:
        file = split_location(kind, rest)[0]
        return f"{kind}:{find(file)}{rest.removeprefix(file)}" if file.endswith(".py") else part
    file, _, function = part.rpartition(":")
    return f"{find(file)}:{function}" if file.endswith(".py") else part
