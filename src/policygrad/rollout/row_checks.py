"""Checks of a task's rows before a run: prompts that leave no room for a completion, columns that a reward needs."""

from __future__ import annotations

from collections.abc import Sequence

from policygrad.models.tokenizer import PromptTooLongError, Tokenizer
from policygrad.rewards.base import Reward
from policygrad.rewards.workers.signature import Signature
from policygrad.rollout.environment import KnowsOpening, ParsesCalls, find_capabilities
from policygrad.tasks.base import Example, LeavesRowsOut, Task

SKIP_OPTION = "--task.skip-bad-rows"
PROBE_EXAMPLES = 16
"""Examples of a task without rows, or with equal ones, whose columns are looked at."""


def check_rows(
    task: Task,
    tokenizer: Tokenizer,
    max_tokens: int,
    environment: object = None,
    *,
    has_demonstrations: bool = False,
    skip_bad_rows: bool = False,
) -> Task:
    """Return the task without the rows that the model cannot be asked, which are counted in a warning; or raise for the first.

    A prompt is encoded as an episode begins: with the descriptions of the environment's tools, where these are known before one
    is begun (`KnowsOpening`). What an environment shows only then is encoded then, and costs its group if it is too long.

    Args:
        has_demonstrations: The algorithm learns from the rows' demonstrations.
        skip_bad_rows: Leave rows out instead of raising.

    Raises:
        PromptTooLongError: A prompt that leaves no room for `max_tokens`, with the row's location.
        ModelError: The chat template refuses a prompt, or cannot show a tool's call and its result.
        DataError: A demonstration that is invalid or longer than `max_tokens`; or no row is left to train on.
    """

    if has_demonstrations:
        from policygrad.rollout.demonstrations import check_demonstrations
    _check_tool_use(task, tokenizer, environment)

    def check(example: Example) -> None:
        source = example.source or "a prompt"
        opening = environment.opening(example) if isinstance(environment, KnowsOpening) else None
        if opening is None:
            tokenizer.encode(example.prompt, max_tokens, source, example.tools)
        else:
            tokenizer.encode(opening.content, max_tokens, source, opening.tools or None)

    def check_all(example: Example) -> None:
        check(example)
        if has_demonstrations:
            check_demonstrations([example], tokenizer, max_tokens)

    if skip_bad_rows and isinstance(task, LeavesRowsOut):
        return task.without_bad_rows(check_all)
    for example in task.rows:
        try:
            check(example)
        except PromptTooLongError as error:
            remedy = f". {SKIP_OPTION} leaves such rows out" if isinstance(task, LeavesRowsOut) else ""
            raise PromptTooLongError(f"{error}{remedy}") from None
    if has_demonstrations:
        check_demonstrations(task.rows, tokenizer, max_tokens)
    return task


def _check_tool_use(task: Task, tokenizer: Tokenizer, environment: object) -> None:
    """Try a tool's call and its result in the first row's conversation. Raises ModelError for a template that cannot show them."""
    for example in task.rows[:1]:
        opening = environment.opening(example) if isinstance(environment, KnowsOpening) else None
        if opening is not None and opening.tools and not isinstance(opening.content, str):
            has_own_parser = isinstance(environment, ParsesCalls) and environment.parser is not None
            source = example.source or "a prompt"
            tokenizer.check_tool_use(opening.content, opening.tools, source, reads_calls=not has_own_parser)


def check_reward_columns(rewards: Sequence[Reward], task: Task, environment: object = None) -> None:
    """Raise RewardError for a reward function that needs a column which the task does not have.

    An environment of the user's own may add columns in its episodes, so that nothing can be said before.
    """
    if environment is not None and not find_capabilities(environment).has_known_columns:
        return
    examples = task.rows[:PROBE_EXAMPLES] or [task.train_example(index) for index in range(PROBE_EXAMPLES)]
    columns = [name for example in examples for name in example.columns]
    given = dict.fromkeys([*columns, *getattr(environment, "reward_columns", ())])
    for reward in rewards:
        Signature.from_function(reward.function).check_columns(reward.name, given)
