"""Environments and tools that show pictures: they are read where they are shown, and the run proves itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

import policygrad as pg
from doubles.files import rows, write_rows
from doubles.vision_models import make_picture, save_family
from policygrad.environments.tools import ToolUse
from policygrad.models.chat.turns import ToolCall
from policygrad.rollout.environment import Action, Observation, Step
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import load_config
from policygrad.training.config.trust import CodePermissions
from policygrad.utils.message_parts import content_text, list_pictures
from policygrad.utils.pictures import to_parts
from policygrad.verification.verify import verify_run

QUESTION = [{"prompt": [{"role": "user", "content": "<image>what?"}], "images": ["0.png"], "answer": "a"}]


class Slides:
    """Three turns; after each the next picture, the second time as an array."""

    waits: ClassVar[bool] = False

    def __init__(self, example: Any, seed: int = 0) -> None:
        self.example, self.turns = example, 0

    async def reset(self) -> Observation:
        return Observation(self.example.prompt)

    async def step(self, action: Action) -> Step:
        self.turns += 1
        reward = float(action.text[:1] in "abcdefghijklm")
        if self.turns == 3:
            return Step(reward=reward)
        picture: Any = make_picture(32, 24, self.turns)
        shown = to_parts(["next:", np.asarray(picture.decode()) if self.turns == 2 else picture])
        return Step(Observation(({"role": "user", "content": shown},)), reward)


OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in ("qwen2_5_vl", "gemma3")]


@pytest.fixture(scope="module", params=["idefics3", *OTHERS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_family(request.param, tmp_path_factory.mktemp(request.param))
    ends = list(range(1, 33))  # so that a quarter of the tokens of a random policy ends its turn
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def make_run(model: Path, folder: Path) -> Run:
    (folder / "0.png").write_bytes(make_picture(40, 24, 7).data)
    return Run(
        algorithm=pg.GRPO,
        model=str(model),
        task=write_rows(folder / "rows.jsonl", QUESTION),
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=4,
        lr=3e-3,
        sampling=pg.SamplingParams(max_tokens=24),
        evaluation=EvaluationConfig(problems=0),
        output=str(folder / "run"),
        verify=2,
        environment=f"{__file__}:Slides",
    )


@pytest.mark.full
def test_a_run_with_pictures_in_observations_holds(model: Path, tmp_path: Path) -> None:
    folder = pg.train(make_run(model, tmp_path), display=False).output
    turns = [row["turns"] for row in rows(folder / "completions.jsonl") if "turns" in row]
    assert max(map(len, turns)) == 5  # three of the policy, and two pictures between them
    result = verify_run(folder, load_config(folder / "run.toml", Run(), CodePermissions(("/",))))
    assert not result.failures, result.failures
    holding = {check.subject for check in result.findings if check.status == "holds" and check.step}
    assert holding >= {"sampler's weights", "gradient", "advantages"}


def look(where: str) -> Any:
    """
    Look at something.

    Args:
        where: what to look at.
    """
    return ["this is it:", make_picture(32, 24, 1)] if where == "there" else "nothing"


async def play(prompt: Any, text: str) -> Step:
    tools = ToolUse((look,), parser=lambda text: [ToolCall("look", {"where": text})] if text else [])
    environment = tools(pg.Example(prompt), 0)
    await environment.reset()
    return await environment.step(Action(text))


async def _content(prompt: Any, text: str) -> Any:
    step = await play(prompt, text)
    assert step.observation is not None
    return step.observation.content


@pytest.mark.parametrize("where", ["there", "elsewhere"])
def test_a_tool_may_return_a_picture(where: str) -> None:
    import asyncio

    (message,) = asyncio.run(_content(({"role": "user", "content": "?"},), where))
    assert message["role"] == "tool"
    shows = list(list_pictures((message,)))
    assert len(shows) == int(where == "there")
    assert content_text(message["content"]) == ("this is it:[image]" if shows else "nothing")
    assert asyncio.run(_content("?", where)) == (
        f"\n<tool_response>\n{'this is it:[image]' if shows else 'nothing'}\n</tool_response>\n"
    )


class Corridor(gymnasium.Env[Any, Any]):
    """Ends after two steps to the right; shows where one stands."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(0, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.place = render_mode, 0

    def reset(self, **options: Any) -> Any:
        self.place = 0
        return np.zeros(3), {}

    def step(self, action: Any) -> Any:
        self.place += int(action)
        return np.zeros(3), float(action), self.place == 2, False, {}

    def render(self) -> Any:
        frame = np.zeros((8, 24, 3), np.uint8)
        frame[:, 8 * self.place : 8 * self.place + 8] = 255
        return frame


def test_gymnasium_shows_frames() -> None:
    import asyncio

    gymnasium.register("Corridor-v0", entry_point=Corridor)
    factory = pg.GymnasiumText("Corridor-v0", actions=("stay", "right"), options={"render_mode": "rgb_array"})

    async def walk() -> None:
        environment = factory(pg.Example("not shown"))
        first = await environment.reset()
        assert not isinstance(first.content, str)
        (picture,) = list_pictures(first.content)
        assert np.asarray(picture.decode())[:, :8].min() == 255
        assert content_text(first.content[0]["content"]).startswith("Answer with one action in square brackets: 0 stay")
        unclear = await environment.step(Action("hm"))
        assert unclear.observation is not None
        assert unclear.observation.content == (
            {"role": "user", "content": "error: name one action in square brackets: 0 stay, 1 right"},
        )
        moved = await environment.step(Action("[right]"))
        assert moved.observation is not None
        (picture,) = list_pictures(moved.observation.content)  # type: ignore[arg-type]
        assert np.asarray(picture.decode())[:, 8:16].min() == 255

    asyncio.run(walk())
    with pytest.raises(pg.ConfigError, match=r"give describe=, .* or options=\{'render_mode': 'rgb_array'\}"):
        pg.GymnasiumText("Corridor-v0")
