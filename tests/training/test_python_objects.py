"""What is handed to a run in the place of names and of our own: objects, environments, trackers, callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import policygrad as pg
from doubles.files import same, weights
from doubles.rewards import digits_first
from doubles.trackers import Record
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.training.config.serialization import load_config
from policygrad.utils.async_runner import AsyncRunner

ROWS = [{"prompt": f"{i} + {j} =\n", "answer": str(i + j)} for i in range(4) for j in range(3)]


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    """The small run with its task and reward as objects."""
    return replace(
        small,
        task=ROWS,
        reward=(digits_first,),
        steps=3,
        prompts_per_step=3,
        samples_per_prompt=4,
        sampling=pg.SamplingParams(max_tokens=6),
        evaluation=pg.EvaluationConfig(problems=2, samples_per_prompt=2),
        output=str(tmp_path / "run"),
    )


def objects(run: pg.Run) -> pg.Run:
    """The same with its model and tokenizer as objects."""
    model = load_model(str(run.model))
    return replace(run, model=model, tokenizer=load_tokenizer(str(run.model), model).hf)


def test_a_run_of_objects_equals_the_run_of_names(run: pg.Run, tmp_path: Path) -> None:
    record = Record()
    named = pg.train(replace(run, output=str(tmp_path / "named")), display=False)
    given = pg.train(objects(run), display=record)
    assert same(weights(named.output), weights(given.output))
    assert "model and tokenizer and task and reward given as objects" in record.said
    assert "from the command line" in record.said


@pytest.mark.full
def test_a_run_of_objects_resumes_from_python_only(run: pg.Run, tmp_path: Path) -> None:
    full = pg.train(replace(objects(run), output=str(tmp_path / "whole")), display=False)
    record = Record()
    pg.train(objects(run), stop_after=1, display=record)
    folder = tmp_path / "run"
    assert record.summary["resume with"] == f"pg.train(run, resume={str(folder)!r})"
    with pytest.raises(pg.ConfigError, match=r"run\.toml: 'model' was a LlamaForCausalLM object given in Python"):
        load_config(folder / "run.toml", pg.Run())
    with pytest.raises(pg.ConfigError, match=r"pg\.train\(run, resume=folder\) with the same object"):
        pg.train(resume=folder, display=False)
    pg.train(objects(run), resume=folder, display=False)
    assert same(weights(full.output), weights(folder))


def test_progress_shows_by_default(run: pg.Run, capsys: pytest.CaptureFixture[str]) -> None:
    pg.train(run)
    out = capsys.readouterr().out
    assert "policygrad · dr_grpo on list object" in out
    assert "step 3/3" in out
    assert "held-out" in out


def test_display_false_prints_nothing(run: pg.Run, capsys: pytest.CaptureFixture[str]) -> None:
    pg.train(replace(run, steps=1), display=False)
    assert capsys.readouterr().out == ""


class Breaks(pg.Tracker):
    """A service that is down."""

    def log(self, step: int, metrics: Mapping[str, float], completions: Any = ()) -> None:
        raise ConnectionError("no route")


def test_a_failing_tracker_is_dropped(run: pg.Run) -> None:
    record = Record()
    with pytest.warns(UserWarning, match="Breaks"):
        result = pg.train(run, display=False, trackers=[Breaks(), record])
    assert result.steps == 3
    assert [step for step, _ in record.steps] == [1, 2, 3]
    assert "Breaks.log failed (ConnectionError: no route)" in record.said


def test_invalid_trackers_and_callbacks_are_refused(run: pg.Run) -> None:
    with pytest.raises(pg.ConfigError, match="is no callback: pass instances"):
        pg.train(run, display=False, callbacks=[Breaks()])  # type: ignore[list-item]
    with pytest.raises(pg.ConfigError, match="is not a tracker: pass instances"):
        pg.train(run, display=False, trackers=[Breaks])  # type: ignore[list-item]


def test_a_callback_may_stop_the_run(run: pg.Run) -> None:
    class Enough(pg.Callback):
        def step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
            if step == 2:
                trainer.stop()

    stopped = pg.train(run, display=False, callbacks=[Enough()])
    assert (stopped.steps, stopped.model) == (2, None)
    assert pg.train(run, resume=stopped.output, display=False).steps == 3


class Chat:
    """Messages: a question, the policy's turn, a tool's answer, the policy's turn."""

    def __init__(self, example: pg.Example) -> None:
        self.example, self.said = example, list[str]()

    async def reset(self) -> pg.Observation:
        return pg.Observation(({"role": "user", "content": str(self.example.prompt)},))

    async def step(self, action: pg.Action) -> pg.Step:
        self.said.append(action.text)
        if len(self.said) == 1:
            return pg.Step(pg.Observation(({"role": "tool", "content": "said the tool"},)), reward=0.25)
        return pg.Step(reward=float(any(c.isdigit() for c in action.text)))


def test_a_conversation_is_one_trajectory_of_the_sampled_ids(run: pg.Run, random_model: Path) -> None:
    run = replace(
        run, model="tiny", reward=(), task="embedded", sampling=pg.SamplingParams(max_tokens=40), prompts_per_step=6
    )
    rollout = pg.collect(run, environment=Chat)
    tokenizer = load_tokenizer("tiny", load_model("tiny"))
    both = [(g, t) for g in rollout.groups for t in g.trajectories if len(t.segments) == 3]
    assert both
    for group, trajectory in both:
        first, tool, second = trajectory.segments
        assert (first.is_sampled, tool.is_sampled, second.is_sampled) == (True, False, True)
        assert int(first.tokens[-1]) in tokenizer.end_ids
        assert "said the tool" in tokenizer.decode(tool.tokens)
        assert trajectory.turn_rewards[0] == 0.25
        assert trajectory.reward == pytest.approx(sum(r for r in trajectory.turn_rewards if r is not None))
        full = [
            {"role": "user", "content": str(group.spec.example.prompt)},
            {"role": "assistant", "content": tokenizer.decode(first.tokens)},
            {"role": "tool", "content": "said the tool"},
            {"role": "assistant", "content": tokenizer.decode(second.tokens)},
        ]
        rendered = tokenizer.hf.apply_chat_template(full, tokenize=False)
        ids = torch.cat([group.prompt_ids, trajectory.tokens])
        message = str(tokenizer.hf.decode(ids, clean_up_tokenization_spaces=False))
        assert rendered.startswith(message) or message == rendered
    batch = rollout.batch
    assert batch.version is not None
    assert set(batch.version[batch.mask].tolist()) == {0}


def test_episodes_without_an_environment_reward_are_reported(run: pg.Run) -> None:
    class Silent(Chat):
        async def step(self, action: pg.Action) -> pg.Step:
            return pg.Step()

    record = Record()
    silent = replace(run, reward=(), model="tiny")
    with pytest.raises(
        pg.RewardError, match="no sample of the first evaluation has a reward: an episode got no reward"
    ):
        pg.train(silent, environment=Silent, display=record, stop_after=1)
    assert "an episode got no reward" in record.said


def test_an_environment_with_inconsistent_prompts_is_refused(run: pg.Run) -> None:
    made: list[Any] = []

    class Fickle(Chat):
        async def reset(self) -> pg.Observation:
            made.append(self)
            return pg.Observation(f"hello {len(made)}")

    with pytest.raises(pg.EngineError, match=r"Fickle\.reset .*samples of one example"):
        pg.collect(run, environment=Fickle)


def test_an_environment_has_no_prefix_values(run: pg.Run) -> None:
    vine = replace(pg.VINEPPO, advantage=(pg.PrefixValue(2),))
    with pytest.raises(
        pg.ConfigError, match="the reasoning steps of a completion, and an environment's episodes consist of turns"
    ):
        pg.collect(replace(run, algorithm=vine, step_end="[a-z ]"), environment=lambda example: pg.SingleTurn(example))


def test_a_filter_gets_the_fields_it_needs(run: pg.Run) -> None:
    """Log-probabilities are the learner's to fill, and filters come before anything else asks for them."""
    seen: list[torch.Tensor] = []

    @dataclass(frozen=True)
    class Likely(pg.Filter):
        """Completions that the policy finds unlikely take no part."""

        needs: ClassVar[frozenset[str]] = frozenset({"logp_old"})

        def __call__(self, batch: pg.Batch) -> pg.Batch:
            assert batch.logp_old is not None
            total = torch.where(batch.mask, batch.logp_old, 0).sum(1)
            seen.append(total)
            return replace(batch, mask=batch.mask & (total >= total.median())[:, None])

    record = Record()
    run = replace(run, algorithm=replace(pg.DR_GRPO, filters=(Likely(),)))
    pg.train(run, display=record, stop_after=1)
    assert len(seen) == 1
    assert torch.isfinite(seen[0]).all()
    assert (seen[0] < 0).any()
    with pytest.raises(pg.ConfigError, match=r"Likely needs Batch\.logp_old"):
        pg.collect(run)  # no learner here to fill it


def test_objects_without_required_methods_are_refused(run: pg.Run) -> None:
    with pytest.raises(pg.ConfigError, match=r"sampler is .*: pass an object with `async generate\(requests\)`"):
        pg.train(run, sampler=3, display=False)  # type: ignore[arg-type]
    with pytest.raises(pg.ConfigError, match=r"learner is .*: pass a function of \(model, run\)"):
        pg.train(run, learner=3, display=False)  # type: ignore[arg-type]

    class Says(Chat):
        async def reset(self) -> Any:
            return "hello"

    class Waits(Chat):
        def reset(self) -> Any:
            return pg.Observation("hello")

    class Ends(Chat):
        async def step(self, action: pg.Action) -> Any:
            return None

    for environment, message in (
        (Says, r"Says\.reset returned str: return an Observation"),
        (Waits, r"Waits\.reset is not async: write `async def reset`"),
        (Ends, r"Ends\.step returned NoneType: return a Step"),
    ):
        with pytest.raises(pg.EngineError, match=message):
            pg.collect(run, environment=environment)


@pytest.mark.full
def test_resume_requires_the_same_kind_of_environment(run: pg.Run) -> None:
    run = replace(run, model="tiny", reward=(), task="embedded", steps=2)
    record = Record()
    stopped = pg.train(run, environment=Chat, stop_after=1, display=record)
    assert "environment given as objects" in record.said
    assert record.summary["resume with"].startswith("pg.train(run, resume=")
    with pytest.raises(pg.RunError, match=r"the run was given an environment from Python.*resume=.*environment="):
        pg.train(resume=stopped.output, display=False)
    assert pg.train(run, environment=Chat, resume=stopped.output, display=False).steps == 2


class Apart(pg.LocalLearner):
    """Learns on a model of its own, not on the one that the run has loaded."""

    @classmethod
    def beside(cls, model: Any, run: pg.Run) -> pg.LocalLearner:
        return pg.make_local_learner(pg.clone_model(model).requires_grad_(True), run)


def test_the_saved_model_has_the_learners_weights(run: pg.Run, tmp_path: Path) -> None:
    """Sampled from and saved: what was learned, also where the learner's weights are others in memory."""
    record = Record()
    named = pg.train(replace(run, output=str(tmp_path / "named")), display=False)
    apart = pg.train(run, learner=Apart.beside, display=record)
    assert same(weights(named.output), weights(apart.output))
    assert all(metrics["staleness/max"] == 0 for _, metrics in record.steps)
    rerun = pg.train(run, learner=Apart.beside, resume=apart.output, display=False)  # over already: saved once more
    assert same(weights(named.output), weights(rerun.output))


@pytest.mark.full
def test_an_evaluation_after_resume_uses_the_checkpoints_weights(run: pg.Run) -> None:
    """Killed after the last checkpoint and before the last measurement: the sampler has its weights by then."""
    seen: list[int] = []

    class Watched(pg.LocalSampler):
        async def generate(self, requests: Any) -> Any:
            seen.append(self.version)
            return await super().generate(requests)

    def sampler(model: Any, tokenizer: Any) -> pg.LocalSampler:
        return Watched.from_tokenizer(model, tokenizer)

    full = pg.train(run, sampler=sampler, display=False)
    lines = (full.output / "metrics.jsonl").read_text().splitlines()
    (full.output / "metrics.jsonl").write_text(
        "\n".join(line for line in lines if "eval/reward_stderr" not in line) + "\n"
    )
    seen.clear()
    rerun = pg.train(run, resume=full.output, sampler=sampler, display=False)
    assert rerun.after == full.after
    assert set(seen) == {3}


def test_a_class_is_a_factory(run: pg.Run) -> None:
    class Own(pg.LocalSampler):
        def __init__(self, model: Any, tokenizer: Any) -> None:
            super().__init__(model, tokenizer.end_ids, 0)

    assert pg.train(run, sampler=Own, display=False, stop_after=1).steps == 1


def test_a_sampler_whose_lengths_do_not_agree_is_refused(run: pg.Run) -> None:
    class Short(pg.LocalSampler):
        async def generate(self, requests: Any) -> Any:
            results = await super().generate(requests)
            return [replace(g, logp=g.logp[:-1]) for g in results]

    with pytest.raises(pg.EngineError, match=r"Short\.generate returned \d+ tokens, \d+ log-probabilities"):
        pg.collect(run, sampler=lambda model, tokenizer: Short.from_tokenizer(model, tokenizer))


def test_a_part_that_is_no_dataclass_is_refused_before_there_is_a_folder(run: pg.Run, tmp_path: Path) -> None:
    class Half(pg.Gate):
        def weight(self, ratio: Any, psi: Any, batch: Any) -> Any:
            return ratio / 2

        def value(self, ratio: Any, psi: Any, batch: Any) -> Any:
            return ratio / 2 * psi

    with pytest.raises(pg.ConfigError, match=r"Half in gate is no dataclass, .* write @dataclass\(frozen=True\)"):
        replace(run, algorithm=replace(pg.GRPO, gate=Half()))


@dataclass(frozen=True)
class ByZero(pg.Advantage):
    def __call__(self, psi: Any, batch: Any) -> Any:
        return psi * 0 / 0


def test_a_nan_advantage_ends_the_run_and_is_named(run: pg.Run) -> None:
    with pytest.raises(pg.NumericsError, match=r"^ByZero in advantage\.0 returned NaN") as caught:
        pg.train(replace(run, algorithm=replace(pg.GRPO, advantage=(ByZero(),))), display=False)
    (note,) = caught.value.__notes__
    assert note.endswith("so correct ByZero first")
    assert "--lr" not in note


def test_a_tokenizer_of_another_model_is_refused(run: pg.Run, tmp_path: Path) -> None:
    own = load_tokenizer("tiny", load_model("tiny")).hf
    own.add_tokens([f"<extra{i}>" for i in range(4)])
    own.save_pretrained(tmp_path / "other")
    for given in (own, str(tmp_path / "other")):
        with pytest.raises(pg.ModelError, match=r"has \d+ tokens and the model has embeddings for \d+"):
            pg.train(replace(run, tokenizer=given), display=False)


def test_a_tokenizer_may_have_its_own_folder(run: pg.Run, tmp_path: Path) -> None:
    load_tokenizer(str(run.model), load_model(str(run.model))).hf.save_pretrained(tmp_path / "tokenizer")
    run = replace(run, tokenizer=str(tmp_path / "tokenizer"))
    assert pg.train(run, display=False, stop_after=1).steps == 1


def test_async_code_runs_inside_a_running_loop_and_is_interruptible() -> None:
    async def answer() -> int:
        return 7

    async def notebook(waiter: AsyncRunner) -> int:
        return waiter(answer())

    async def interrupted() -> None:
        raise KeyboardInterrupt

    with AsyncRunner() as waiter:
        assert waiter(answer()) == 7
        assert asyncio.run(notebook(waiter)) == 7
        with pytest.raises(KeyboardInterrupt):
            waiter(interrupted())
        assert waiter(answer()) == 7
    waiter.close()
