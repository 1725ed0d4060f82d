"""What cannot act in a run is said at its start and in --dry-run; what acts in its last but one step is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows, same, weights
from doubles.trackers import Record
from policygrad.commands.train import parse_run
from policygrad.training.config.run import Run, find_idle_settings
from policygrad.training.trainer import train


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"algorithm": pg.ITERATIVE_GRPO},
            ["Reference.refresh_every = 100", "16 steps", "--steps above 100", "refresh-every to 4"],
        ),
        ({"algorithm": pg.ITERATIVE_GRPO, "steps": 101}, []),
        ({"algorithm": pg.PRORL}, ["Reference.refresh_every = 200", "--steps above 200"]),
        ({"algorithm": pg.PRORL, "steps": 200}, ["Reference.refresh_every = 200"]),
        ({"algorithm": pg.PRORL, "steps": 400}, []),
        ({"algorithm": pg.VAPO, "steps": 100}, []),
        (
            {"algorithm": pg.VAPO, "steps": 20},
            ["Critic.pretrain = 20", "is not trained", "--algorithm.critic.pretrain"],
        ),
        ({"algorithm": pg.GRPO, "steps": 1}, []),
    ],
)
def test_presets_report_idle_schedules(changes: dict[str, object], says: list[str]) -> None:
    result = find_idle_settings(Run(**changes))  # type: ignore[arg-type]
    assert len(result) == bool(says)
    assert all(word in result[0] for word in says)


@pytest.mark.parametrize(("steps", "acts"), [(8, True), (7, False), (1, False)])
def test_refresh_after_stall_that_never_acts(steps: int, acts: bool) -> None:
    """Scores after steps 2, 4 and 6, the second and third no better: anew with step 7, and compared with from step 8 on."""
    algorithm = replace(pg.GRPO, reference=pg.Reference(refresh_after_stall=2))
    result = find_idle_settings(Run(algorithm=algorithm, steps=steps, evaluation=pg.EvaluationConfig(every=2)))
    assert (not result) is acts
    if not acts:
        assert "after step 7 at the earliest" in result[0]
        assert "Set --steps above 7" in result[0]


@pytest.mark.full
def test_the_report_is_correct(small: Run, tmp_path: Path) -> None:
    """Of three steps a reference taken anew after the third changes no weight, after the second it does."""
    algorithm = replace(pg.GRPO, terms=(pg.KLToReference(1.0, "k3"),))
    run = replace(small, algorithm=algorithm, steps=3, prompts_per_step=2, sampling=pg.SamplingParams(max_tokens=4))
    never = train(replace(run, output=str(tmp_path / "never")), display=False)
    for every, acts in ((2, True), (3, False)):
        record = Record()
        refreshed = replace(run, algorithm=replace(algorithm, reference=pg.Reference(refresh_every=every)))
        result = train(replace(refreshed, output=str(tmp_path / f"every {every}")), display=record)
        metrics = rows(result.output / "metrics.jsonl")
        assert [m["step"] for m in metrics if m.get("reference/refreshed")] == [every]
        assert same(weights(never.output), weights(result.output)) is not acts
        assert any("never takes effect in this run" in note for note in record.notes) is not acts


UNIT = "with one update per rollout every ratio π_θ/π_old is 1"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("grpo --algorithm.gate.low 0.1", "Clip.low = 0.1 of the gate has no effect: with one update per rollout every ratio"),
        ("grpo --algorithm.gate.low 0.1 --algorithm.gate.high 0.3", "Clip.low = 0.1 of the gate and Clip.high = 0.3 of the"),
        ("grpo --algorithm.gate ClippedImportance", "the gate ClippedImportance has no effect: " + UNIT),
        ("grpo --algorithm.ratio Sequence", "the ratio Sequence has no effect: " + UNIT),
        ("grpo --algorithm.gate ClipCov --algorithm.gate.fraction 0.1", ""),
        ("grpo --algorithm.gate.low 0.1 --algorithm.update-rule.minibatches 2", ""),
        ("grpo --algorithm.gate.low 0.1 --algorithm.old-policy sampler", ""),
        ("trpo --algorithm.gate Clip", ""),  # its line search compares with the old policy
        ("grpo", ""),
        ("grpo --algorithm.reference.success-reward 2", "Reference.success_reward = 2 of the reference has no effect: no template"),
        ("scale_rl --algorithm.filters.drop-zero-variance.max-rounds 8", "it needs mode = refill, which is drop"),
        ("dapo --algorithm.filters.drop-zero-variance.max-rounds 8", ""),
        ("raft --algorithm.advantage.rejection-sampling.keep best --algorithm.advantage.rejection-sampling.threshold 0.5",
         "RejectionSampling.threshold = 0.5 of the advantage has no effect: it needs keep = right, which is best"),
        ("passk --algorithm.advantage.pass-at-k.no-normalise --algorithm.advantage.pass-at-k.eps 1e-3", "it needs normalise"),
        ("grpo --algorithm.terms ExactEntropy --algorithm.terms.exact-entropy.step 1e-3", "ExactEntropy.step = 0.001 of the term"),
        ("grpo --algorithm.terms ExactEntropy --algorithm.terms.exact-entropy.target 0.3 "
         "--algorithm.terms.exact-entropy.eta 0 --algorithm.terms.exact-entropy.step 1e-3", ""),
        ("chord --algorithm.terms.demonstration-nll.decay-rollouts 10", "it needs final_mu, which is not set"),
        ("ppo --algorithm.critic.pretrain-until 0.9", "it needs pretrain above 0, which is 0"),
        ("gigpo --algorithm.advantage.group-in-group.no-std --algorithm.advantage.group-in-group.ddof 0", "it needs std, which is"),
        ("distill --teacher tiny --algorithm.advantage.teacher-log-ratio.coefficient 0 "
         "--algorithm.advantage.teacher-log-ratio.discount 0.5", "coefficient is 0, so that TeacherLogRatio adds nothing"),
        ("sdft --algorithm.gate Clip --algorithm.update-rule.minibatches 2", "the advantage of sdft is always 0"),
        ("grpo --algorithm.terms.kl-to-reference.beta 0 --algorithm.terms.kl-to-reference.form k2", "beta is 0, so that KLTo"),
        ("asymre --algorithm.ratio Sequence", "the gate UnitWeight does not read the ratio"),
        ("ppo --samples-per-prompt 4", "only 256 completions of 64 prompts. --samples-per-prompt 1 --prompts-per-step 256"),
        ("grpo --samples-per-prompt 4", ""),
        ("grpo --environment.timeout 5", "environment.timeout = 5.0 has no effect: the run has no environment"),
        ("grpo --sampler.timeout 9 --sampler.threads 2", "have no effect: sampler.engine is local"),
        ("grpo --sampler.engine vllm --decode-rows 9", "decode_rows = 9 has no effect: it is for sampling in this process"),
        ("grpo --evaluation.problems 0 --evaluation.top-k 5", "evaluation.top_k = 5 has no effect: evaluation.problems is 0"),
        ("grpo --evaluation.top-k 1 --evaluation.temperature 2", "evaluation.temperature = 2.0 has no effect: evaluation"),
        ("grpo --evaluation.benchmark-problems 2", "no benchmark is measured"),
        ("grpo --evaluation.every 16", "evaluation.every = 16 has no effect: the run has 16 steps"),
        ("grpo --evaluation.every 15", ""),
        ("grpo --checkpoint.every 16", "checkpoint.every = 16 has no effect"),
        ("grpo --guard.window 16", "guard.window = 16 has no effect: the guard compares a step with"),
        ("grpo --guard.lr-factor 0.1", "guard.lr_factor = 0.1 has no effect: guard.action is warn"),
        ("grpo --guard.lr-factor 0.1 --guard.action rollback", ""),
        ("grpo --optimizer.warmup 16", "optimizer.warmup = 16 is not over at the run's end"),
        ("grpo --optimizer.warmup 16 --algorithm.update-rule.epochs 2", ""),
        ("grpo --learner.hang-timeout 5", "learner.hang_timeout = 5.0 has no effect: the run has one process"),
        ("grpo --trace-mib 9", "trace_mib = 9 has no effect: no trace is written"),
    ],
)  # fmt: skip
def test_settings_that_cannot_act_are_named_with_a_remedy(argv: str, says: str) -> None:
    result = find_idle_settings(parse_run(argv.split())[0])
    assert len(result) == bool(says), result
    assert not says or says in result[0]


def test_evaluation_sizes_that_the_task_does_not_have() -> None:
    evaluation = pg.EvaluationConfig(problems=50, every=4)
    assert [*evaluation.find_unused(50, has_rewards=True)] == []
    [text] = evaluation.find_unused(12, has_rewards=True)
    assert "evaluation.problems = 50 is more than the task's 12 held-out problems" in text
    [text] = evaluation.find_unused(0, has_rewards=False)
    assert "evaluation.problems = 50 and evaluation.every = 4 have no effect: the task has no reward" in text
    assert [*pg.EvaluationConfig().find_unused(12, has_rewards=True)] == []


def test_the_only_token_that_is_left_is_refused() -> None:
    with pytest.raises(pg.ConfigError, match=r"top_k=1 .* temperature=1 has no effect: set --top-k to 0"):
        parse_run(["grpo", "--top-k", "1"])


@pytest.mark.full
@pytest.mark.parametrize("gate", [pg.Clip(0.01, 0.01), pg.ClippedImportance(0.5, 1.5), pg.SigmoidGate(9.0, 9.0)])
def test_a_gate_that_is_said_to_have_no_effect_has_none(small: Run, tmp_path: Path, gate: pg.Gate) -> None:
    """To the last bit; with two updates per rollout it has one."""
    for minibatches, acts in ((1, False), (2, True)):
        rule, moving = pg.GradientSteps(1, minibatches), (small.reward[0].replace("starts_with_a_digit", "letters"),)
        run = replace(small, algorithm=replace(pg.GRPO, update_rule=rule), reward=moving, steps=2, lr=3e-2)
        other = replace(run, algorithm=replace(run.algorithm, gate=gate))
        results = [
            train(replace(r, output=str(tmp_path / f"{minibatches}-{i}")), display=False)
            for i, r in enumerate((run, other))
        ]
        assert same(*(weights(result.output) for result in results)) is not acts
        assert bool(find_idle_settings(other)) is not acts


def test_a_dry_run_reports_idle_schedules(run_command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, message, _ = run_command("train", "prorl", "--dry-run")
    assert code == 0
    assert "# Note: Reference.refresh_every = 200 never takes effect" in message
    (tmp_path / "run.toml").write_text(message)
    code, rerun, _ = run_command("train", "--config", str(tmp_path / "run.toml"), "--steps", "300", "--dry-run")
    assert code == 0
    assert "Note:" not in rerun
