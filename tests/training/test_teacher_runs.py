"""Runs that learn from a teacher behind a server, and from several teachers; what they refuse, and how they stop and resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.files import rows, write_rows
from doubles.teacher_forms import Reply, TeacherForm, serving
from doubles.trackers import Record
from policygrad.errors import EngineError
from policygrad.learners.base import LearnerSpec
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import load_config
from policygrad.training.cost_estimate import compute_algorithm_cost
from policygrad.training.trainer import train
from policygrad.verification.verify import verify_run

Command = Callable[..., tuple[int, str, str]]
URL = "http://127.0.0.1:9/v1"


@pytest.fixture(scope="module")
def served() -> Iterator[TeacherForm]:
    """The embedded model behind a server."""
    model = load_model("tiny", dtype="fp32", device="cpu")
    with serving(TeacherForm(model, load_tokenizer("tiny", model).hf)) as form:
        yield form


@pytest.fixture
def form(served: TeacherForm) -> Iterator[TeacherForm]:
    served.requests.clear()
    yield served
    served.change = lambda path, body, reply: reply


def taught_by(**reference: Any) -> pg.Algorithm:
    return replace(pg.DISTILL, reference=pg.Reference(**reference))


def taught(small: Run, output: Path, **reference: Any) -> Run:
    run = replace(small, steps=3, prompts_per_step=2, samples_per_prompt=4, verify=3)
    return replace(run, algorithm=taught_by(**reference), output=str(output))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.full)])
def test_a_served_teacher_teaches_what_one_in_memory_does(
    small: Run, tmp_path: Path, form: TeacherForm, engine: str
) -> None:
    form.engine = engine
    near, far = Record(), Record()
    train(taught(small, tmp_path / "near", model="tiny"), display=near)
    result = train(taught(small, tmp_path / "far", model=form.url), display=far)
    for (_, a), (_, b) in zip(near.steps, far.steps, strict=True):
        assert b["teacher/kl"] == pytest.approx(a["teacher/kl"], abs=1e-5)
        assert b["time/teacher"] > 0
        assert b["teacher/retries"] == 0
    for name, tensor in weights(tmp_path / "near").items():
        assert torch.allclose(tensor, weights(tmp_path / "far")[name], atol=1e-4)
    assert far.info is not None
    assert far.info.facts["reference"] == f"{form.url} (behind a server)"
    assert len(form.scored) > 4 * 4
    assert load_config(result.output / "run.toml", Run()).algorithm.reference == pg.Reference(model=form.url)
    form.engine = "vllm"


@pytest.mark.full
def test_a_run_resumes_with_rollouts_that_the_teacher_has_scored(small: Run, tmp_path: Path, form: TeacherForm) -> None:
    """Sampled one step ahead: the queued rollout's log-probabilities are in the checkpoint."""
    run = replace(taught(small, tmp_path / "straight", model=form.url), max_staleness=1)
    train(run, display=False)
    train(replace(run, output=str(tmp_path / "stopped")), stop_after=2, display=False)
    record = Record()
    train(resume=tmp_path / "stopped", display=record)
    assert "algorithm differs" not in record.said
    for name, tensor in weights(tmp_path / "straight").items():
        assert torch.equal(tensor, weights(tmp_path / "stopped")[name])


@pytest.mark.full
def test_a_run_whose_teacher_goes_away_ends_resumably(small: Run, tmp_path: Path, form: TeacherForm) -> None:
    run = taught(small, tmp_path / "run", model=form.url)
    run = replace(run, teacher_server=pg.TeacherServerConfig(recovery_timeout=0.2))
    expected = train(replace(run, output=str(tmp_path / "straight")), display=False)
    form.requests.clear()

    def leave(path: str, body: Any, reply: Reply) -> Reply:
        return (503, {"error": "shutting down"}) if len(form.scored) > 12 else reply

    form.change = leave
    with pytest.raises(EngineError, match=r"503 .*shutting down.*--teacher-server.recovery-timeout"):
        train(run, display=False)
    done = [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "teacher/kl" in row]
    assert 1 <= len(done) < 3
    form.change = lambda path, body, reply: reply
    result = train(resume=tmp_path / "run", display=False)
    for name, tensor in weights(expected.output).items():
        assert torch.equal(tensor, weights(result.output)[name])


@pytest.mark.full
def test_verify_needs_no_server(small: Run, tmp_path: Path, form: TeacherForm) -> None:
    result = train(taught(small, tmp_path / "run", model=form.url), display=False)
    form.change = lambda path, body, reply: (503, {"error": "gone"})
    verification = verify_run(result.output, load_config(result.output / "run.toml", Run()))
    assert not verification.failures
    told = {finding.subject: finding for finding in verification.findings if finding.step is not None}
    assert told["teacher"].status == "not checked"
    assert {"samples", "advantages", "gradient", "weights"} <= {
        name for name, finding in told.items() if finding.status == "holds"
    }


def test_each_example_is_distilled_from_its_teacher(
    small: Run, tmp_path: Path, form: TeacherForm, random_model: Path
) -> None:
    """One teacher in memory and one behind a server: each completion's numbers are those of a run with its teacher alone."""
    data = [{"prompt": f"{i} + 1 =\n", "teacher": "far" if i % 2 else "near"} for i in range(40)]
    run = replace(small, task=write_rows(tmp_path / "two.jsonl", data), reward=())
    record = Record()
    teachers = (f"far={form.url}", f"near={random_model}")
    result = train(
        replace(taught(run, tmp_path / "two", teachers=teachers), steps=2, prompts_per_step=4), display=record
    )
    assert record.info is not None
    assert record.info.facts["reference"].startswith(f"far={form.url}, near=")
    first = record.steps[0][1]
    assert first["teacher/kl/near"] == pytest.approx(0.0, abs=1e-6)  # the policy's own model
    assert first["teacher/kl/far"] > 0.1
    prompts = {tuple(ids[:3]) for ids in form.scored}
    tokenizer = load_tokenizer(str(random_model), load_model(str(random_model), dtype="fp32", device="cpu"))
    odd = {tuple(tokenizer.encode(f"{i} + 1 =\n", 8).ids[:3].tolist()) for i in range(1, 40, 2)}
    assert prompts <= odd
    loaded = load_config(result.output / "run.toml", Run())
    assert loaded.algorithm.reference == pg.Reference(teachers=teachers)
    assert not verify_run(result.output, loaded).failures


@pytest.mark.parametrize(("alpha", "others"), [(1.0, "one"), pytest.param(0.5, "none", marks=pytest.mark.full)])
def test_a_server_s_likeliest_tokens_teach_what_a_model_in_memory_does(
    small: Run, tmp_path: Path, form: TeacherForm, alpha: float, others: Any
) -> None:
    """The batch carries them; `verify` and a resumed run take them from there."""
    chain = (pg.TeacherLogRatio(coefficient=0),)
    term = pg.ExactKLToReference(alpha=alpha, top_k=4, top_of="reference", others=others)

    def make(name: str, model: str) -> Run:
        run = taught(small, tmp_path / name, model=model)
        return replace(run, algorithm=replace(run.algorithm, terms=(term,), advantage=chain), max_staleness=1)

    near, far = Record(), Record()
    train(make("near", "tiny"), display=near)
    result = train(make("far", form.url), display=far)
    for (_, a), (_, b) in zip(near.steps, far.steps, strict=True):
        assert b["objective"] == pytest.approx(a["objective"], abs=1e-5)
    for name, tensor in weights(tmp_path / "near").items():
        # Adam makes a step of up to the learning rate, 1e-3, of a gradient that is all rounding: one weight in 1,000 of a tensor
        assert torch.allclose(tensor, weights(tmp_path / "far")[name], atol=3e-4)
    train(make("stopped", form.url), stop_after=2, display=False)
    train(resume=tmp_path / "stopped", display=False)
    form.change = lambda path, body, reply: (503, {"error": "gone"})
    for name, tensor in weights(tmp_path / "far").items():
        assert torch.equal(tensor, weights(tmp_path / "stopped")[name])
    assert not verify_run(result.output, load_config(result.output / "run.toml", Run())).failures


def test_a_learner_scores_each_row_with_its_teacher(random_model: Path) -> None:
    policy = load_model(str(random_model), dtype="fp32", device="cpu")
    tokenizer = load_tokenizer(str(random_model), policy)
    algorithm = taught_by(teachers=("a=tiny", f"b={random_model}", "c=http://c"))
    teachers = {0: pg.load_reference("tiny", tokenizer), 1: pg.load_reference(str(random_model), tokenizer)}
    batch = pg.Batch(
        mask=torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool),
        group=torch.tensor([0, 0, 1, 1]),
        reward=torch.zeros(4),
        tokens=torch.tensor([[5, 6, 7], [8, 9, 0], [10, 0, 0], [11, 12, 13]]),
        prompts=(torch.tensor([3, 4]), torch.tensor([20])),
        teacher=torch.tensor([1, 0, 2, 0]),
        logp_ref=torch.full((4, 3), -7.0),
    )
    learner = pg.LocalLearner(policy, LearnerSpec(algorithm, 1e-3, 1), teachers=teachers)
    scored = learner.evaluate(batch, algorithm.needs).logp_ref
    assert scored is not None
    assert scored[2, 0] == -7.0  # by the server
    for row, name in ((0, str(random_model)), (1, "tiny"), (3, "tiny")):
        alone = replace(pg.DISTILL, reference=pg.Reference(model=name))
        one = pg.LocalLearner(policy, LearnerSpec(alone, 1e-3, 1), reference=pg.load_reference(name, tokenizer))
        expected = one.evaluate(batch, alone.needs).logp_ref
        assert expected is not None
        assert torch.allclose(scored[row][batch.mask[row]], expected[row][batch.mask[row]], atol=1e-6)
    assert learner.reference_parameters == sum(p.numel() for m in teachers.values() for p in m.parameters())
    with pytest.raises(pg.ConfigError, match=r"was given the teachers \[\], and those .* are \[0, 1\]"):
        pg.LocalLearner(policy, LearnerSpec(algorithm, 1e-3, 1))


def test_rows_without_a_teacher_are_refused_before_the_first_step(small: Run, tmp_path: Path) -> None:
    with pytest.raises(pg.PolicygradError, match=r"has no column 'teacher', and Reference.teachers has a, b"):
        train(taught(small, tmp_path / "run", teachers=("a=tiny", "b=tiny")), display=False)


def test_models_in_memory_are_counted() -> None:
    def frozen(**reference: Any) -> int:
        return compute_algorithm_cost(taught_by(**reference)).frozen_models

    assert frozen(model="tiny") == frozen() == 1
    assert frozen(model=URL) == 0
    assert frozen(teachers=(f"a={URL}", "b=x", "c=y")) == 2
    assert compute_algorithm_cost(taught_by(model=URL)).scoring_passes == 1
    assert compute_algorithm_cost(taught_by(model="tiny")).scoring_passes == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"sampling": pg.SamplingParams(temperature=0.7)},
            "temperature=0.7: the teacher at http.* Set --temperature 1",
        ),
        ({"sampling": pg.SamplingParams(top_k=5)}, "top_p and top_k: the teacher at http"),
        ({"sampling": pg.SamplingParams(top_p=0.9)}, "top_p and top_k: the teacher at http"),
        (
            {
                "algorithm": taught_by(teachers=("a=x", f"b={URL}")),
                "learner": pg.LearnerConfig(world_size=2, device="cpu"),
            },
            "learner.world_size=2 shards one reference, and Reference.teachers has 1 to load: serve them",
        ),
        (
            {"algorithm": taught_by(model="x"), "teacher_server": pg.TeacherServerConfig(timeout=5)},
            "teacher_server.* are options for a teacher at http.* leave them out",
        ),
    ],
)
def test_what_a_run_refuses(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(pg.ConfigError, match=says):
        pg.Run(**{"algorithm": taught_by(model=URL), **changes})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: replace(taught_by(model=URL), terms=(pg.ExactKLToReference(),)),
            r"full vocabulary, and the server http://127.0.0.1:9/v1 tells its likeliest tokens at most: set .*top-of reference",
        ),
        (
            lambda: replace(taught_by(model=URL), terms=(pg.ExactKLToReference(top_k=5),)),
            r"ExactKLToReference\(top_of='policy'\) needs .* tells its own likeliest and the sampled ones: set .*top-of reference",
        ),
        (
            lambda: replace(taught_by(teachers=("a=x", "b=y")), terms=(pg.ExactKLToReference(),)),
            "one of several teachers scores the sampled tokens alone: use TeacherLogRatio",
        ),
        (lambda: replace(pg.PRIME, reference=pg.Reference(model=URL)), "ImplicitReward.* cannot be copied"),
        (
            lambda: replace(pg.DAPO, reference=pg.Reference(teachers=("a=x",))),
            "reference.teachers is .* no part of dapo",
        ),
        (lambda: pg.Reference(model="x", teachers=("a=y",)), "both name what the policy is compared with"),
        (lambda: pg.Reference(teachers=("a=y",), refresh_every=2), "Reference.teachers are frozen"),
        (
            lambda: pg.Reference(teachers=("runs/math",)),
            "must be NAME=MODEL each, such as math=runs/math, not 'runs/math'",
        ),
        (lambda: pg.Reference(teachers=("math=",)), "must be NAME=MODEL each"),
        (lambda: pg.Reference(teachers=("a=x", "a=y")), "has a name twice"),
    ],
)
def test_what_a_reference_refuses(make: Callable[[], object], says: str) -> None:
    with pytest.raises(pg.ConfigError, match=says):
        make()


def test_a_reference_that_is_served_can_hold_a_kl() -> None:
    """Any part that reads `logp_ref` alone: a KL in the loss or in the reward."""
    for algorithm in (pg.GRPO, pg.REINFORCE_PP):
        pg.Run(algorithm=replace(algorithm, reference=pg.Reference(model=URL)))


def test_teachers_on_the_command_line(run_command: Command) -> None:
    code, out, _ = run_command("train", "distill", "--teacher", f"math={URL}", "code=runs/code", "--dry-run")
    assert code == 0
    assert f'"math={URL}",' in out
    assert '"code=runs/code",' in out
    code, out, _ = run_command("train", "distill", "--teacher", f"{URL}#adapter", "--dry-run")
    assert code == 0
    assert f'model = "{URL}#adapter"' in out
    assert "other models" not in out.partition("# memory:")[2]
    code, _, error = run_command("train", "distill", "--teacher", "runs/a", "runs/b", "--dry-run")
    assert code != 0
    assert "must be NAME=MODEL each" in " ".join(error.split())
