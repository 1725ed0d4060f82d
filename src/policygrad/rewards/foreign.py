"""Reward functions with the signatures of other libraries: `verl:mine.py`, `openrlhf:reward_func.py`, `trl:mine.py:f`.

Sources: verl, docs/preparation/reward_function.rst ("Customized"), its reward managers for what may be returned, and
BatchRewardManager for functions of a full batch; OpenRLHF, README, "Single-Turn Agent: Reinforced Fine-tuning with Custom Rewards"
(--remote_rm_url FILE); TRL, docs/source/grpo_trainer.md ("Using a custom reward function") and GRPOTrainer._calculate_rewards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from policygrad.errors import ConfigError, RewardError
from policygrad.rewards.base import COMPLETION_IDS, TRAINER_STATE, RewardFunction
from policygrad.rewards.resolve import FOREIGN, split_location
from policygrad.rewards.workers.signature import LOG_EXTRA, LOG_METRIC, MetricLog, Signature, log_nothing, with_logged
from policygrad.utils.message_parts import content_text
from policygrad.utils.user_code import FileFunction, import_function


@dataclass(frozen=True)
class ForeignReward:
    """A function with the signature of another library."""

    function: RewardFunction
    kind: ClassVar[str]

    @classmethod
    def load(cls, name: str) -> Self:
        """Load the function at `FILE.py`, `FILE.py:NAME` or `package.module.NAME`. Raises ConfigError."""
        file, attribute = split_location(cls.kind, name)
        if not name or not attribute:
            kind, default = cls.kind, FOREIGN[cls.kind]
            examples = [f"{kind}:mine.py", f"{kind}:mine.py:{default}"] if default else [f"{kind}:mine.py:my_function"]
            raise ConfigError(f"reward {f'{kind}:{name}'!r} names no function: {', '.join(examples)}")
        is_file = file.endswith(".py")
        return cls(FileFunction(str(Path(file).resolve()), attribute) if is_file else import_function(name))

    @property
    def reward_prepare(self) -> Any:
        return getattr(self.function, "reward_prepare", None)

    @property
    def reward_options(self) -> Mapping[str, Any]:
        """Options of the function's own decorator, `pg.reward`."""
        return getattr(self.function, "reward_options", {})


@dataclass(frozen=True)
class VerlReward(ForeignReward):
    """`compute_score(data_source, solution_str, ground_truth, extra_info)` → a number, or a dict with `score` (older: `reward`) and
    perhaps `feedback`.

    A function with the argument `solution_strs` gets the full batch, `data_sources, solution_strs, ground_truths, extra_infos`, and
    returns a list of these.

    ground_truth comes from the column `reward_model`, or is `answer`; data_source and extra_info are the columns of these names, or
    None. The function may be async.
    """

    kind = "verl"

    @property
    def is_batched(self) -> bool:
        return "solution_strs" in _parameters(self.function)

    @property
    def reward_options(self) -> Mapping[str, Any]:
        return {**super().reward_options, **({"batched": True} if self.is_batched else {})}

    def __call__(self, prompts: Any, completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
        sources, extras = ([row.get(column) for row in rows] for column in ("data_source", "extra_info"))
        truths = [_find_ground_truth(row) for row in rows]
        function: Callable[..., Any] = self.function
        if self.is_batched:
            batch = function(data_sources=sources, solution_strs=completions, ground_truths=truths, extra_infos=extras)
            returned: list[Any] = [batch]
        else:
            arguments = zip(sources, completions, truths, extras, strict=True)
            returned = [
                function(data_source=source, solution_str=text, ground_truth=truth, extra_info=extra)
                for source, text, truth, extra in arguments
            ]
        if not any(map(inspect.isawaitable, returned)):
            return self._extract_scores(returned)

        async def wait() -> Any:
            return self._extract_scores([await each if inspect.isawaitable(each) else each for each in returned])

        return wait()

    def _extract_scores(self, returned: list[Any]) -> Any:
        if not self.is_batched:
            return [_extract_verl_score(each) for each in returned]
        (batch,) = returned
        batch = batch.tolist() if hasattr(batch, "tolist") else batch
        return [_extract_verl_score(each) for each in batch] if isinstance(batch, (list, tuple)) else batch


def _find_ground_truth(row: Mapping[str, Any]) -> Any:
    model = row.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    if "answer" not in row:
        raise RewardError("verl's functions need a ground_truth: the task has neither reward_model nor answer")
    return row["answer"]


def _extract_verl_score(returned: Any) -> Any:
    """Return the number, perhaps with its feedback; a dict without one as it is, for the message."""
    if not isinstance(returned, Mapping):
        return returned
    score = returned.get("score", returned.get("reward"))
    if score is None:
        return returned
    return {"score": score, "feedback": returned["feedback"]} if "feedback" in returned else score


@dataclass(frozen=True)
class OpenRLHFReward(ForeignReward):
    """`reward_func(queries, prompts, labels)` → a tensor or list of rewards, or a dict with `rewards`.

    queries are prompts followed by their completions, labels the column `answer` (--label_key there), lists of one. A chat prompt
    is the contents of its messages, a line each: the model's template is not known here.
    """

    kind = "openrlhf"

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        texts = [
            prompt
            if isinstance(prompt, str)
            else "".join(f"{content_text(message.get('content') or '')}\n" for message in prompt)
            for prompt in prompts
        ]
        queries = [prompt + text for prompt, text in zip(texts, completions, strict=True)]
        labels = list(columns.get("answer", [None] * len(queries)))
        returned: Any = self.function(queries=queries, prompts=texts, labels=labels)
        if isinstance(returned, Mapping) and "rewards" not in returned:
            raise RewardError(f"it returned a dict without 'rewards', {', '.join(map(str, returned)) or 'empty'}")
        return returned["rewards"] if isinstance(returned, Mapping) else returned


@dataclass(frozen=True)
class TRLReward(ForeignReward):
    """`f(prompts, completions, completion_ids, trainer_state, log_metric, **columns)` → a list of numbers or None, plain or async.

    The completion of a prompt of messages is a list of one message, `[{"role": "assistant", "content": text}]`, else it is a text.
    """

    kind = "trl"

    def __post_init__(self) -> None:
        if "environments" in Signature.from_function(self.function).required:
            raise ConfigError(
                "reward 'trl:…' needs the argument 'environments', which is not passed here: let the environment name the columns "
                "that it gives (reward_columns), and take these as arguments"
            )

    @property
    def required_columns(self) -> frozenset[str]:
        return Signature.from_function(self.function).required

    @property
    def episode_columns(self) -> frozenset[str]:
        named = Signature.from_function(self.function)
        return frozenset({COMPLETION_IDS, TRAINER_STATE}) if named.accepted is None else named.episode

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        pairs = zip(prompts, completions, strict=True)
        texts: list[Any] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}] for prompt, text in pairs
        ]
        logged = MetricLog()
        arguments: dict[str, Any] = {"prompts": prompts, "completions": texts, **columns}
        arguments |= {LOG_METRIC: logged, LOG_EXTRA: log_nothing}
        if state := arguments.pop(TRAINER_STATE, ()):
            arguments[TRAINER_STATE] = state[0]
        accepted = Signature.from_function(self.function).accepted
        function: Callable[..., Any] = self.function
        returned = function(**{name: x for name, x in arguments.items() if accepted is None or name in accepted})
        return with_logged(returned, logged)


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return frozenset()
