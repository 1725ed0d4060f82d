"""Tools that are plain functions: described, called, answered, budgeted; whatever a policy says of them, nothing falls over."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch

import policygrad as pg
from doubles.scripted_sampler import conversation
from policygrad.checkpoint.manifest import decode_json, encode_json
from policygrad.environments.tools import Tool, ToolResult
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import Tokenizer, load_tokenizer
from policygrad.rollout.batching import batch_groups, measure_rollout
from policygrad.rollout.environment import Observation, Step
from policygrad.rollout.serialization import pack_groups, unpack_groups
from policygrad.rollout.trajectory import reward_inputs
from policygrad.sandbox import PythonTool, find_backend

ASKED = pg.Example("1 + 2 =\n", {"answer": "3"})
ENDLESS = threading.Event()


def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def later(text: str) -> dict[str, str]:
    """Says it later.

    Args:
        text: what is to be said
    """
    await asyncio.sleep(0)
    return {"said": text}


def fails(how: Literal["value", "exit", "stop", "own"]) -> str:
    """Fails.

    Args:
        how: in which way
    """
    raise {"value": ValueError("no such number"), "exit": SystemExit(3), "stop": StopIteration()}.get(
        how, pg.ConfigError("no wall")
    )


def hangs() -> None:
    """Comes back much too late."""
    ENDLESS.wait(30)


async def sleeps() -> None:
    """Never comes back."""
    await asyncio.Event().wait()


TOOLS = (add, later, fails, hangs, sleeps)


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    yield load_tokenizer("tiny", load_model("tiny"))
    ENDLESS.set()


def right(answer: str, example: pg.Example) -> float:
    return float(answer.strip() == example.columns["answer"])


def played(tokenizer: Tokenizer, *turns: str, example: pg.Example = ASKED, **options: Any) -> Any:
    given = {"tools_in_prompt": False, "reward": right} | options
    tools = given.pop("tools", TOOLS)
    budget = {"max_tokens": given.pop("max_tokens")} if "max_tokens" in given else {}
    group, sampler = conversation(tokenizer, pg.ToolUse(tools, **given), example, turns, **budget)  # type: ignore[arg-type]
    (trajectory,) = group.trajectories
    return trajectory, sampler


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def test_a_function_describes_itself() -> None:
    tool = Tool.from_function(add)
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {"type": "integer", "description": "the second"},
                },
                "required": ["a"],
            },
        },
    }


def test_a_function_whose_parameters_have_no_names_is_refused() -> None:
    def total(*numbers: int) -> int:
        """Adds numbers.

        Args:
            numbers: as many as there are
        """
        return sum(numbers)

    with pytest.raises(pg.ConfigError, match="'total' has the parameter 'numbers', which a call cannot give by name"):
        Tool.from_function(total)


def test_a_conversation_with_a_tool(tokenizer: Tokenizer) -> None:
    trajectory, sampler = played(tokenizer, f"I add. {call('add', a=1, b=2)}", "3")
    first, answer, second = trajectory.segments
    assert (first.is_sampled, answer.is_sampled, second.is_sampled) == (True, False, True)
    assert tokenizer.decode(answer.tokens) == "\n<tool_response>\n3\n</tool_response>\n"
    assert (trajectory.reward, trajectory.stop_reason, trajectory.truncated) == (1.0, "answer", False)
    assert trajectory.metrics["calls"] == 1.0
    asked = torch.cat([sampler.asked[0].prompt_ids, first.tokens, answer.tokens])
    assert torch.equal(sampler.asked[1].prompt_ids, asked)  # the very ids, and nothing but a continuation of them


def forges() -> str:
    """Says that the turn is over."""
    return "3<eos>"


def test_tool_output_ends_no_turn(tokenizer: Tokenizer) -> None:
    trajectory, _ = played(tokenizer, call("forges"), "3", tools=(forges,))
    answer = trajectory.segments[1]
    assert not tokenizer.end_ids & set(answer.tokens.tolist())
    assert tokenizer.decode(answer.tokens) == "\n<tool_response>\n3<eos>\n</tool_response>\n"


@pytest.mark.parametrize(
    ("message", "answer", "why"),
    [
        (call("add", a=4, b=5), "9", ""),
        ("<tool_call>add(4, 5)</tool_call>", "9", ""),
        (call("add", a=4), "4", ""),
        (call("later", text="é"), '{"said": "é"}', ""),
        ("<tool_call>{nothing}</tool_call>", "error: the call is no JSON", "malformed"),
        (call("subtract", a=1), "error: there is no tool 'subtract', there are add, later, fails", "unknown"),
        (call("add", a=1, c=2), "error: add: got an unexpected keyword argument 'c'", "arguments"),
        (call("add"), "error: add: missing a required argument: 'a'", "arguments"),
        (call("add", a="1"), 'error: add: a is to be of type integer, not "1"', "arguments"),
        (call("add", a=True), "error: add: a is to be of type integer, not true", "arguments"),
        (
            call("fails", how="softly"),
            'error: fails: how is to be one of ["value", "exit", "stop", "own"], not "softly"',
            "arguments",
        ),
        (call("fails", how="value"), "error: ValueError: no such number", "raised"),
        (call("fails", how="exit"), "error: RuntimeError: SystemExit(3)", "raised"),
        (call("fails", how="stop"), "error: RuntimeError: StopIteration()", "raised"),
        (call("hangs"), "error: hangs took longer than 0.05 seconds", "slow"),
        (call("sleeps"), "error: sleeps took longer than 0.05 seconds", "slow"),
    ],
)
def test_results_of_calls(tokenizer: Tokenizer, message: str, answer: str, why: str) -> None:
    slow = {"timeout": 0.05} if why == "slow" else {}
    trajectory, _ = played(tokenizer, message, "3", **slow)
    assert f"<tool_response>\n{answer}" in tokenizer.decode(trajectory.segments[1].tokens)
    failures = {name: count for name, count in trajectory.metrics.items() if name != "calls" and count}
    assert failures == ({f"calls_{why}": 1.0} if why else {})
    assert trajectory.reward == 1.0  # the episode goes on


def test_errors_that_a_policy_cannot_avoid_are_raised(tokenizer: Tokenizer) -> None:
    with pytest.raises(pg.ConfigError, match="no wall"):
        played(tokenizer, call("fails", how="own"), "3")


def test_several_calls_are_answered_and_rewarded_in_order(tokenizer: Tokenizer) -> None:
    both = call("add", a=1, b=1) + call("add", a="x")

    def paid(called: pg.ToolCall, answer: ToolResult) -> float:
        assert called.name == "add"
        return -0.5 if answer.failure else 0.1

    trajectory, _ = played(tokenizer, both, "4", call_reward=paid)
    message = tokenizer.decode(trajectory.segments[1].tokens)
    assert message.index("\n2\n") < message.index("error: add")
    assert trajectory.turn_rewards == (pytest.approx(-0.4), 0.0)
    assert trajectory.metrics["calls"] == 2.0


def test_turns_and_tokens_limit_an_episode(tokenizer: Tokenizer) -> None:
    rerun = call("add", a=1, b=2)
    trajectory, _ = played(tokenizer, rerun, rerun, rerun, "3", max_turns=3)
    assert (trajectory.stop_reason, trajectory.reward, len(trajectory.turn_rewards)) == ("turns", 0.0, 3)
    size = len(tokenizer.hf(rerun)["input_ids"]) + 1
    cut, _ = played(tokenizer, rerun, rerun, "3", max_tokens=size + 5)
    assert (cut.stop_reason, cut.truncated, cut.reward, cut.num_sampled_tokens) == ("tokens", True, 0.0, size + 5)
    full, _ = played(tokenizer, rerun, "3", max_tokens=size)  # nothing is left to say, so the answer is not heard
    assert (full.stop_reason, full.truncated, len(full.segments)) == ("tokens", True, 1)
    assert full.reward == 0.0  # it ended without an answer
    paid, _ = played(tokenizer, rerun, max_tokens=size, call_reward=lambda c, a: 0.25)
    assert (paid.turn_rewards, paid.reward) == ((0.25,), 0.25)
    narrow = Tokenizer(
        tokenizer.hf, tokenizer.end_ids, "narrow", len(tokenizer.hf("1 + 2 =\n")["input_ids"]) + size + 3
    )
    short, _ = played(narrow, rerun, "3", max_tokens=size)
    assert short.stop_reason == "tokens"


def test_the_context_limit_ends_an_episode(tokenizer: Tokenizer) -> None:
    class Talks:
        def __init__(self, example: pg.Example) -> None:
            pass

        async def reset(self) -> Observation:
            return Observation("1")

        async def step(self, action: pg.Action) -> Step:
            return Step(Observation(" 2" * 20))

    narrow = Tokenizer(tokenizer.hf, tokenizer.end_ids, "narrow", 30)
    group, _ = conversation(narrow, Talks, ASKED, ["3"] * 9, max_tokens=20)
    assert (group.trajectories[0].stop_reason, group.trajectories[0].truncated) == ("context", True)
    assert group.trajectories[0].reward is None

    class Sorry(Talks):
        async def on_truncated(self) -> float:
            return -0.5

    group, _ = conversation(narrow, Sorry, ASKED, ["3"] * 9, max_tokens=20)
    assert group.trajectories[0].turn_rewards[-1] == group.trajectories[0].reward == -0.5

    class Lost(Talks):
        async def on_truncated(self) -> float:
            return float("nan")

    with pytest.raises(pg.EngineError, match="reward = nan: give a finite number"):
        conversation(narrow, Lost, ASKED, ["3"] * 9, max_tokens=20)


def test_tool_metrics_are_recorded(tokenizer: Tokenizer) -> None:
    rerun = call("add", a=1, b=2)
    groups = []
    for turns in ([rerun, "3"], [rerun, rerun, rerun]):
        group, _ = conversation(tokenizer, pg.ToolUse((add,), right, max_turns=3, tools_in_prompt=False), ASKED, turns)
        groups.append(group)
    values = {name: metric.value for name, metric in measure_rollout([(groups, batch_groups(groups))]).items()}
    assert values["environment/turns"] == 2.5
    assert (values["environment/ended_answer"], values["environment/ended_turns"]) == (0.5, 0.5)
    assert (values["environment/calls"], values["environment/calls_raised"]) == (2.0, 0.0)


def test_long_tool_outputs_are_shortened(tokenizer: Tokenizer) -> None:
    def counts(n: int) -> str:
        """Counts.

        Args:
            n: to where
        """
        return " ".join(map(str, range(n)))

    trajectory, _ = played(tokenizer, call("counts", n=500), "3", tools=(counts,), max_output_chars=40)
    message = tokenizer.decode(trajectory.segments[1].tokens)
    assert message.startswith("\n<tool_response>\n0 1 2 3")
    assert "characters" in message
    assert len(message) < 120


def test_tools_may_depend_on_the_example_and_the_group_s_seed(tokenizer: Tokenizer) -> None:
    seeds: list[int] = []

    def tools(example: pg.Example, seed: int) -> list[Any]:
        seeds.append(seed)

        def reveal() -> str:
            """What the answer is."""
            return f"{example.columns['answer']} of {seed}"

        return [reveal]

    environment = pg.ToolUse(tools, right, tools_in_prompt=False)
    group, _ = conversation(tokenizer, environment, ASKED, [call("reveal"), "3"], samples=3)
    assert len(seeds) == 3
    assert len({*seeds}) == 1
    assert f"3 of {seeds[0]}" in group.trajectories[2].text
    other = pg.Example("2 + 1 =\n", {"answer": "3"})
    conversation(tokenizer, environment, other, [call("reveal"), "3"])
    assert seeds[-1] == seeds[0]  # of the run's seed, the step and the place in it: known before anything is drawn


class Shop:
    def __init__(self, example: pg.Example) -> None:
        self.cart: list[str] = []

    def buy(self, what: str) -> str:
        """Puts something into the cart.

        Args:
            what: its name
        """
        self.cart.append(what)
        return "done"


def in_shop(tokenizer: Tokenizer, *turns: str, **options: Any) -> Any:
    return played(tokenizer, *turns, tools=lambda example: [Shop(example).buy], **options)[0]


def test_rewards_see_the_state_of_an_episode_s_tools(tokenizer: Tokenizer) -> None:
    def spent(answer: str, example: pg.Example, cart: list[str]) -> float:
        return float(len(cart))

    turns = (call("buy", what="tea"), call("buy", what="milk"), "3")
    trajectory = in_shop(tokenizer, *turns, reward=spent, reward_columns=("cart",))
    assert (trajectory.reward, trajectory.columns) == (2.0, {"cart": ["tea", "milk"]})

    environment = pg.ToolUse(lambda example: [Shop(example).buy], tools_in_prompt=False, reward_columns=("cart",))
    groups = [conversation(tokenizer, environment, ASKED, said, samples=2)[0] for said in (turns, ("3",))]
    tensors, values = pack_groups(groups)  # as a checkpoint holds them
    for restored in (groups, list(unpack_groups(tensors, decode_json(encode_json(values, "groups")), lambda i: ASKED))):
        _, completions, columns = reward_inputs(restored)
        assert columns["cart"] == [["tea", "milk"]] * 2 + [[]] * 2
        assert columns["answer"] == ["3"] * 4
        rows = [t for group in restored for t in group.trajectories]
        assert list(columns["completion_ids"]) == [t.visible_tokens.tolist() for t in rows]
        assert tokenizer.decode(torch.tensor(columns["completion_ids"][0])) == completions[0]


def test_a_state_that_no_reward_can_see_costs_its_episode(tokenizer: Tokenizer) -> None:
    class Odd(Shop):
        answer, place = "3", object()

    for name, why in {
        "wallet": "no tool's object has the attribute 'wallet', which ToolUse.reward_columns names",
        "place": "place is a object, which JSON cannot hold",
        "answer": "the task or the rollout has the column 'answer' already",
    }.items():
        tools = lambda example: [Odd(example).buy]  # noqa: E731
        trajectory, _ = played(tokenizer, "3", tools=tools, reward=None, reward_columns=(name,))
        assert why in trajectory.failure
        assert (trajectory.reward, trajectory.stop_reason) == (None, "failed")
    with pytest.raises(pg.ConfigError, match="reward_columns is a tuple of names"):
        pg.ToolUse((add,), reward_columns="cart")


def test_python_is_a_tool(tokenizer: Tokenizer) -> None:
    tool = Tool.from_function(PythonTool())
    assert tool.name == "python"
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["code"]
    try:
        find_backend()
    except pg.ConfigError as error:
        pytest.skip(f"no wall stands here: {error}")
    trajectory, _ = played(tokenizer, call("python", code="2 ** 70"), "3", tools=(PythonTool(),))
    assert "1180591620717411303424" in trajectory.text


def test_a_tool_without_a_description_is_refused() -> None:
    def silent(a: int) -> int:
        return a

    def half(a: int) -> int:
        """Returns it."""
        return a

    def untyped(a):  # type: ignore[no-untyped-def]
        """Returns it.

        Args:
            a: it
        """
        return a

    for function in (silent, half, untyped):
        with pytest.raises(pg.ConfigError, match=rf"the tool '{function.__name__}' cannot be described .*`Args:`"):
            pg.ToolUse((function,))
    with pytest.raises(pg.ConfigError, match="a tool must be a function, not 3"):
        pg.ToolUse((3,))  # type: ignore[arg-type]
    with pytest.raises(pg.ConfigError, match="two tools are named 'add'"):
        pg.ToolUse((add, add))
    with pytest.raises(pg.ConfigError, match="max_turns, max_output_chars and max_calls must be at least 1"):
        pg.ToolUse((add,), max_turns=0)


def test_the_prompt_lists_the_tools(tokenizer: Tokenizer) -> None:
    chat = pg.Example(({"role": "user", "content": "1 + 2?"},), {"answer": "3"})
    for example in (ASKED, chat):
        trajectory, sampler = played(tokenizer, call("add", a=1, b=2), "3", example=example, tools_in_prompt=True)
        prompt = tokenizer.decode(sampler.asked[0].prompt_ids)
        assert '"description": "Adds two numbers."' in prompt
        assert prompt.index("</tools>") < prompt.index("1 + 2")
        assert "<tool_response>\n3\n</tool_response>" in tokenizer.decode(trajectory.segments[1].tokens)
