"""run.toml, both ways: what is written is read back; what is wrong is named with its file, its key and the way out."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.algorithms import runnable
from policygrad.algorithms import ALGORITHMS, DAPO, RLOO
from policygrad.core.base import Advantage
from policygrad.core.batch import Batch
from policygrad.core.gates import Clip, ClippedImportance
from policygrad.core.metrics import Metrics
from policygrad.errors import ConfigError
from policygrad.samplers.base import SamplingParams
from policygrad.training.config.option_checks import MAX_LR
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import (
    algorithm_to_dict,
    dump_config,
    from_dict,
    load_config,
    load_part_class,
)


@dataclass(frozen=True)
class Halved(Advantage):
    """Somebody's own part."""

    factor: float = 0.5

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        return psi * self.factor


def read(folder: Path, text: str | bytes, base: Run | None = None) -> Run:
    path = folder / "my.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path, base or Run())


RESOLVED = {"dapo", "ppo", "iterative_grpo", "distill", "trpo_vine", "prime"}


@pytest.mark.parametrize(
    ("name", "resolved"),
    [
        *((name, False) for name in ALGORITHMS),
        *(pytest.param(name, True, marks=[] if name in RESOLVED else pytest.mark.full) for name in ALGORITHMS),
    ],
)
def test_toml_round_trip(tmp_path: Path, name: str, resolved: bool) -> None:
    lr = 1e-300 if ALGORITHMS[name].update_rule.uses_lr else None
    run = Run(algorithm=runnable(name), reward=("math", "format*0.5"), output='a "quoted" Ψ', lr=lr)
    run = run.resolve() if resolved else run
    assert read(tmp_path, dump_config(run)) == run
    assert from_dict({"algorithm": algorithm_to_dict(run.algorithm)}, Run(), "a dict").algorithm == run.algorithm


@settings(max_examples=10)
@given(
    st.floats(min_value=0, max_value=MAX_LR),
    st.integers(min_value=0, max_value=2**62),
    st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    st.floats(min_value=1e-9, allow_nan=False, allow_infinity=False),
)
def test_toml_round_trip_of_any_value(lr: float, seed: int, model: str, temperature: float) -> None:
    import tomllib

    from policygrad.training.config.serialization import from_dict

    run = Run(lr=lr, seed=seed, model=model, sampling=SamplingParams(temperature=temperature))
    assert from_dict(tomllib.loads(dump_config(run)), Run(), "text") == run


def test_a_resolved_run_is_complete() -> None:
    run = Run(algorithm=DAPO, sampling=SamplingParams(max_tokens=77)).resolve()
    assert run.samples_per_prompt == run.algorithm.samples_per_prompt == 8
    assert run.algorithm.shaping[0].length == 77
    assert run.resolve() == run


def test_an_algorithm_may_be_a_name_or_tables(tmp_path: Path) -> None:
    assert read(tmp_path, 'algorithm = "dr-grpo"').algorithm.name == "dr_grpo"
    made = read(tmp_path, '[algorithm]\nname = "dapo"\n[algorithm.gate]\nhigh = 0.4\n').algorithm
    assert made == replace(DAPO, gate=Clip(0.2, 0.4))
    made = read(
        tmp_path, '[algorithm]\nname = "mine"\nfilters = []\ngate = { part = "ClippedImportance", high = 3 }\n'
    ).algorithm
    assert made == replace(DAPO, name="mine", filters=(), gate=ClippedImportance(0.0, 3.0))
    made = read(tmp_path, '[algorithm]\nname = "rloo"\nratio = "none"\n').algorithm
    assert made == RLOO


def test_a_custom_part_round_trips(tmp_path: Path) -> None:
    run = read(tmp_path, f'[[algorithm.advantage]]\npart = "{__name__}:Halved"\nfactor = 0.25\n')
    assert run.algorithm.advantage == (Halved(0.25),)
    assert read(tmp_path, dump_config(run)) == run


def test_a_file_changes_the_base_configuration(tmp_path: Path) -> None:
    base = Run(steps=9, lr=1e-5, algorithm=DAPO)
    made = read(tmp_path, "[sampling]\ntemperature = 2\n", base)
    assert (made.steps, made.lr, made.algorithm, made.sampling) == (9, 1e-5, DAPO, SamplingParams(temperature=2.0))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stesp = 3", "unknown key 'stesp': did you mean 'steps'?"),
        ("[sampling]\ntemprature = 1.0", "unknown key 'sampling.temprature': did you mean 'temperature'?"),
        ("sampling = 3", "'sampling' is a table, not 3"),
        ('steps = "3"', "'steps' must be a whole number, not '3'"),
        ("steps = 3.5", "'steps' must be a whole number, not 3.5"),
        ("steps = true", "'steps' must be a whole number, not True"),
        ("lr = true", "'lr' must be a number, not True"),
        ("model = 3", "'model' must be text in quotes, not 3"),
        ('reward = "math"', "'reward' must be a list of text in quotes, not 'math'"),
        ("reward = [1]", "'reward[0]' must be text in quotes, not 1"),
        ("[optimizer]\nbetas = [0.9]", "'optimizer.betas' must be a list of 2, not [0.9]"),
        ("[learner]\ngradient_checkpointing = 1", "must be true or false, not 1"),
        ("steps = 0", "steps must be at least 1, not 0"),
        ("lr = inf", "lr must be at least 0 and finite, not inf"),
        ("[checkpoint]\nkeep = 0", "checkpoint: checkpoint.every and checkpoint.keep must be at least 1"),
        ('algorithm = "gprpo"', "unknown algorithm 'gprpo': did you mean 'grpo'?"),
        ("algorithm = 3", "'algorithm' is a table, not 3"),
        ("[algorithm]\ngat = 3", "unknown key 'algorithm.gat': did you mean 'gate'?"),
        (
            '[algorithm]\nadvantage = "GroupMean"',
            "'algorithm.advantage' is a list of parts: write [[algorithm.advantage]]",
        ),
        ("[[algorithm.advantage]]\nddof = 1", "'algorithm.advantage' needs a `part`"),
        ('[algorithm]\ngate = "Clipp"', "algorithm.gate: no part is called 'Clipp': did you mean 'Clip'?"),
        ('[algorithm]\ngate = "grpo"', "algorithm.gate: no part is called 'grpo'"),
        ('[algorithm]\ngate = "Batch"', "algorithm.gate: no part is called 'Batch'"),
        (
            '[algorithm]\ngate = "TokenMean"',
            "TokenMean goes into 'aggregation', not 'gate', which takes ClassificationWeight, Clip, ",
        ),
        ('[algorithm]\nupdate_rule = "none"', "'algorithm.update_rule' cannot be none"),
        ("[algorithm.gate]\nhihg = 0.3", "unknown key 'algorithm.gate.hihg' of Clip: did you mean 'high'?"),
        ('[algorithm.gate]\nhigh = "0.3"', "'algorithm.gate.high' must be a number, not '0.3'"),
        ("[algorithm.gate]\nhigh = -1", "algorithm.gate: Clip.high must be at least 0, not -1.0"),
        ('[algorithm]\nname = "grpo"\nreference = "none"', "needs a reference, and reference is None"),
        ('[algorithm]\nname = "reinforce"\nupdate_rule = { epochs = 2 }', "one update per rollout, not 2"),
        ('[[algorithm.terms]]\npart = "KLToReference"\nform = "k1"', "zero expected gradient"),
        ('[[algorithm.shaping]]\npart = "KLInReward"\nform = "k2"', "KLInReward takes k1 only"),
        ("samples_per_prompt = 1", "set samples_per_prompt to 2 or more"),
        ('[algorithm]\ngate = "os:path"', "names code of its own, os, which the command line does not"),
        ('[algorithm]\ngate = "no.such.module:Part"', "cannot import the part 'no.such.module:Part'"),
        ("steps = ", "is not valid TOML: "),
        ("steps = 1\nsteps = 2", "is not valid TOML: "),
        (b"model = '\xff'", "is not UTF-8 (byte 9)"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, text: str | bytes, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert says in str(caught.value)
    assert "my.toml" in str(caught.value)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nosuch.toml"):
        with pytest.raises(ConfigError, match="cannot read the configuration"):
            load_config(path, Run())


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbfsteps = 3").steps == 3


def test_token_budget_and_decode_rows_are_checked() -> None:
    with pytest.raises(ValueError, match="tokens must be at least 1, not 0; leave it out for no budget"):
        Run(tokens=0)
    with pytest.raises(ValueError, match="decode_rows must be at least 1, not 0"):
        pg.SamplingParams(decode_rows=0)
    run = Run(tokens=10**9, sampling=pg.SamplingParams(decode_rows=64))
    assert from_dict(tomllib.loads(dump_config(run)), Run(), "run.toml") == run


def test_a_rollout_has_no_more_minibatches_than_prompts() -> None:
    """A minibatch is whole groups. What runs then is in the configuration, and what was asked for is said."""
    small = Run(algorithm=pg.DAPO, prompts_per_step=4)
    assert "dapo splits a rollout into 16 minibatches" in small.minibatch_warning
    assert "4 prompts per step make only 4" in small.minibatch_warning
    assert "raise prompts_per_step to 16" in small.minibatch_warning
    run = small.resolve()
    assert run.algorithm.update_rule == pg.GradientSteps(minibatches=4)
    assert run.minibatch_warning == "" == Run(algorithm=pg.DAPO, prompts_per_step=16).minibatch_warning
    assert run == run.resolve()
    alone = Run(
        algorithm=replace(pg.PPO_PENALTY, update_rule=pg.DualDescent(minibatches=2)), prompts_per_step=1
    ).resolve()
    assert alone.algorithm.update_rule == pg.DualDescent(minibatches=1)


@pytest.mark.parametrize("gpu", [None, "without bf16", "with bf16"])
def test_the_default_precision_depends_on_the_gpu(monkeypatch: pytest.MonkeyPatch, gpu: str | None) -> None:
    """On a CPU it is fp32: bf16 is slower there for a small model. A run's file has what was chosen."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu is not None)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: gpu == "with bf16")
    chosen = "bf16" if gpu == "with bf16" else "fp32"
    assert Run().learner.dtype == "auto"
    assert Run().resolve().learner.dtype == chosen
    assert pg.SFTConfig(data="x.jsonl").resolve().learner.dtype == chosen
    assert Run(learner=pg.LearnerConfig(device="cpu")).resolve().learner.dtype == "fp32"
    assert Run(learner=pg.LearnerConfig(dtype="bf16", device="cpu")).resolve().learner.dtype == "bf16"


def test_a_custom_update_rule_with_fixed_minibatches_is_refused() -> None:
    @dataclass(frozen=True)
    class Halves(pg.UpdateRule):
        minibatches: ClassVar[int] = 2  # type: ignore[misc]
        updates: ClassVar[int] = 2  # type: ignore[misc]
        formula: ClassVar[str] = "two halves"  # type: ignore[misc]

        def __call__(self, problem: object) -> Metrics:
            raise NotImplementedError

    own = replace(pg.DR_GRPO, update_rule=Halves())
    with pytest.raises(ValueError, match="2 minibatches of whole groups need as many prompts per step, not 1"):
        Run(algorithm=own, prompts_per_step=1)


def test_refresh_after_stall_needs_evaluations() -> None:
    waiting = replace(pg.PRORL, reference=pg.Reference(refresh_after_stall=3, reset_optimizer=True))
    with pytest.raises(ValueError, match=r"Reference.refresh_after_stall = 3 .* set evaluation.every"):
        Run(algorithm=waiting)
    with pytest.raises(ValueError, match=r"evaluation.problems\) above 0, or refresh_after_stall to 0"):
        Run(algorithm=waiting, evaluation=pg.EvaluationConfig(every=5, problems=0))
    assert Run(algorithm=waiting, evaluation=pg.EvaluationConfig(every=5)).algorithm is waiting


@pytest.mark.parametrize("term", [pg.KLToOld(), pg.ExactKLToOld()], ids=lambda term: type(term).__name__)
def test_a_penalty_on_the_old_policy_needs_a_second_step(term: object) -> None:
    """With one gradient step a rollout it would be 0 throughout, in silence."""
    held = replace(pg.DR_GRPO, terms=(term,))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=rf"{type(term).__name__} .*update_rule=GradientSteps\(epochs=4\)",
    ):
        Run(algorithm=held)
    for step in (pg.GradientSteps(epochs=2), pg.GradientSteps(minibatches=2), pg.TrustRegion()):
        Run(algorithm=replace(held, update_rule=step))


def test_an_open_field_stays_open_where_the_named_algorithm_has_a_value(tmp_path: Path) -> None:
    """prorl renews its reference every 200 rollouts; a run that waits for better scores instead must not get the 200 back."""
    waits = replace(pg.PRORL, reference=pg.Reference(refresh_after_stall=2))
    run = pg.Run(algorithm=waits, evaluation=pg.EvaluationConfig(every=5))
    path = tmp_path / "run.toml"
    path.write_text(dump_config(run))
    assert load_config(path, Run()).algorithm.reference == waits.reference


def test_names_in_place_of_objects_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pg\.get_algorithm\('dapo'\)"):
        pg.Run(algorithm="dapo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"reward=\('math',\)"):
        pg.Run(reward="math")  # type: ignore[arg-type]


def test_a_custom_part_is_found_in_the_current_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "gates_of_mine.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Open:\n    width: float = 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert load_part_class("gates_of_mine:Open", "command line", "algorithm.gate").__name__ == "Open"
    with pytest.raises(ConfigError, match="move the class to a module of its own"):
        load_part_class("__main__:Nowhere", "run.toml", "algorithm.gate")
