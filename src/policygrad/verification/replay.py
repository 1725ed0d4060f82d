"""Repeat single steps of a run, from the state before them, and compare every stage with what the run recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policygrad.checkpoint.format import Checkpoint, load_checkpoint
from policygrad.core.algorithm import Algorithm
from policygrad.core.auxiliary import Reference
from policygrad.core.batch import PER_COMPLETION, PER_TOKEN, Batch, Forward
from policygrad.core.metrics import Mean, Metrics, drop_unmeasured, merge
from policygrad.core.objective import surrogate, with_selected_tokens
from policygrad.core.staleness import resolve_old_policy
from policygrad.core.updates import GradientProblem, GradientSteps, require_problem
from policygrad.errors import CheckpointError, ConfigError
from policygrad.findings import EXACT, Difference, Finding, Tolerance, differs, explain_difference, holds, not_checked
from policygrad.learners.base import CloseableLearner, Learner
from policygrad.models.tokenizer import Tokenizer
from policygrad.papers.objectives import describe_departure, paper_objective
from policygrad.rollout.batching import batch_groups
from policygrad.rollout.environment import find_capabilities
from policygrad.rollout.reference_prompts import add_reference_prompts
from policygrad.rollout.rollouter import Rollout
from policygrad.rollout.trajectory import RolloutConfig, RolloutRequest, reward_inputs
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.config import LOCAL, SamplerConfig
from policygrad.samplers.engines import probe
from policygrad.trackers.jsonl import format_row
from policygrad.training.config.paths import check_files_exist
from policygrad.training.config.run import Run
from policygrad.training.divergence_guard import DivergenceGuard
from policygrad.training.learner_setup import limit_torch_threads, make_learner, make_local_learner
from policygrad.training.loop import Progress, StepOutcome, StepResult, TrainedRollout, run_loop, train_on_rollout
from policygrad.training.provenance import Fingerprint, fingerprint_inputs
from policygrad.training.run_state import pack_progress, restore_progress
from policygrad.training.setup import Resources, load_resources, prepare_run
from policygrad.training.step_log import build_completion_rows, explain_mismatch
from policygrad.training.step_records import StepRecord, TensorDigest, digest_tensor, digest_weights
from policygrad.utils.garbage import paused_garbage_collection

GRADIENT_TOLERANCE = 1e-4
"""Relative to the largest derivative of a token; float32 stays some 1e-6 from float64."""
MAX_FLIPS = 0.01
"""Fraction of tokens that may lie so close to a bound of the gate that rounding decides on which side."""
MAX_FORMULA_TOKENS = 2**17
"""The formula takes about half a millisecond a token."""
MAX_TRIED_UPDATES = 64
"""A step whose weights differ is repeated with a known fault in each of at most this many of its updates."""
REWARD_TOLERANCE = Tolerance(1e-9, 1e-9)
MOMENT_TOLERANCE = 0.02
"""Relative, of the norm of a tensor of moments where results are not the same bits."""
UNREPEATABLE_METRICS = (
    *("time/", "tokens_per_second", "tokens/computed", "sampler/prefill_"),
    *("rewards/failed_timeout", "rewards/logged/"),
)
"""Metrics that depend on the machine, on how busy it is, on how processes divide texts, and on what was sampled before the step;
and what reward functions log, which may be a time."""


@dataclass(frozen=True, eq=False)
class StepReplayer:
    """A run, loaded to repeat steps of it."""

    run: Run
    config: Run
    """The run as it is repeated: resolved, with one learner, whose weights sample too. An engine's samples cannot be repeated, and
    the rest of a step does not need it; several learners compute what one does."""
    resources: Resources
    learner: Learner
    fingerprint: Fingerprint
    initial: Checkpoint
    """The state at the beginning of the run."""

    @classmethod
    def load(cls, run: Run, folder: Path, stack: ExitStack) -> StepReplayer:
        """Load task, rewards, model and learner, as at the beginning of the run.

        Teachers that are behind servers are not connected: what they said is in the record, and need not be the same bits again.
        """
        local = run if run.sampler.engine == LOCAL else replace(run, sampler=SamplerConfig())
        learner_config = replace(local.learner, world_size=1, tensor_parallel=1, context_parallel=1)
        config = replace(local, learner=learner_config, track=(), output=str(folder)).resolve()
        torch.manual_seed(config.seed)
        check_files_exist(config)
        with paused_garbage_collection():
            resources = load_resources(stack, config, config.algorithm)
            stack.enter_context(limit_torch_threads(resources.model))
            learner = make_learner(make_local_learner, resources.model, config)
        if isinstance(learner, CloseableLearner):
            stack.callback(learner.close)
        resources, _ = prepare_run(config, resources, folder, is_initial=False)
        tensors, values = pack_progress(Progress(config.algorithm.init_state()), config.algorithm, *learner.state())
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        initial = Checkpoint(0, copies | {"rng/torch": torch.get_rng_state()}, deepcopy(values), folder)
        return cls(run, config, resources, learner, fingerprint_inputs(config, resources.model), initial)

    def restore(self, saved: Checkpoint) -> Progress:
        """Return to the state of a checkpoint. What changed since in the run's inputs is a finding of its own."""
        tensors = dict(saved.tensors)
        torch.set_rng_state(tensors.pop("rng/torch"))
        saved = replace(saved, tensors=tensors)
        learner, note = self.learner, _ignore_note
        progress = restore_progress(saved, self.config, self.resources, learner, learner.restore, note)
        DivergenceGuard(self.config.guard, note).restore(saved.state.get("guard"), learner)
        return progress


def _ignore_note(text: str, kind: str | None = None) -> None:
    """Do nothing: a note is for who watches a run."""


@dataclass(frozen=True, eq=False)
class Replay:
    """A recorded step, with all that is needed to repeat it."""

    replayer: StepReplayer
    record: StepRecord
    saved: Checkpoint
    """The state before."""
    is_exact: bool
    """This machine and its libraries are those of the run, so that results are the same bits."""
    evaluated: Metrics
    """Metrics of an evaluation after the step, which the state of the algorithm's parts may depend on."""
    earlier: Sequence[Path] = ()
    """Checkpoints of earlier steps, newest first, with which a sampler may have been left."""

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def run(self) -> Run:
        return self.replayer.run

    @property
    def tolerance(self) -> Tolerance:
        """For values that a step computes from its batch."""
        return EXACT if self.is_exact else Tolerance(1e-3, 1e-4)

    def iter_earlier(self) -> Iterator[Checkpoint]:
        """Iterate over the states of earlier steps, newest first, down to the beginning of the run."""
        for path in self.earlier:
            with suppress(CheckpointError):
                yield load_checkpoint(path)
        if self.step > 1:
            yield self.replayer.initial

    def restore(self) -> tuple[Progress, Algorithm]:
        """Return to the state before the step; return it and the algorithm as it was in the step."""
        progress = self.replayer.restore(self.saved)
        return progress, self.run_algorithm.with_state(progress.state)

    @property
    def run_algorithm(self) -> Algorithm:
        return self.replayer.config.algorithm


def has_served_teacher(algorithm: Algorithm) -> bool:
    """Return whether a teacher is behind a server, whose log-probabilities a replay takes from the record."""
    return algorithm.reference is not None and bool(algorithm.reference.servers)


def check_step(replay: Replay) -> Iterator[Finding]:
    """Repeat a step stage by stage, each from what the run recorded of the stage before, and compare the results."""
    step, record, learner = replay.step, replay.record, replay.replayer.learner
    progress, algorithm = replay.restore()
    if record.weights_before and digest_weights(learner.state()[0]) != record.weights_before:
        where = "the model and seed that the run names" if progress.step == 0 else replay.saved.path.name
        yield differs("model", f"the step did not begin with the weights of {where}", step)
    if learner.version != record.version_before:
        yield differs(
            "state",
            f"the step began with weights of version {record.version_before}, and the state before it has {learner.version}",
            step,
        )
    sampled = list(check_samples(replay, progress, algorithm))
    yield from sampled
    if all(finding.subject != "rewards" for finding in sampled):
        yield from check_recorded_rewards(record, replay.replayer)
    yield check_sampler_weights(replay, algorithm)
    has_ratios = record.batch.logp_old is not None and algorithm.update_rule.updates > 1
    policy = None if has_ratios else evaluate_policy(replay)
    if has_served_teacher(replay.run_algorithm):
        text = "a server's log-probabilities are those that the run recorded: it is not called again"
        yield not_checked("teacher", text, step)
    trained = train_on_rollout(record.rollout, algorithm, learner)
    yield _check_batch_fields(replay, trained)
    if difference := explain_difference(trained.psi, record.psi, record.batch.mask, replay.tolerance):
        text = f"{difference.message}, computed again from the same batch"
        yield differs("advantages", text, step, difference.error, difference.factor)
    else:
        text = f"computed again from the same batch they are the same ({replay.tolerance})"
        yield holds("advantages", text, step)
    if policy is None:  # after the updates, where ratios are not 1 and gates act
        yield check_gradient(replay, trained, evaluate_policy(replay), "after the step's updates")
    else:
        yield check_gradient(replay, trained, policy, "at the weights before the step")
    metrics = merge(drop_unmeasured(record.rollout.metrics), trained.metrics, trained.update_metrics)
    values = {name: metric.value for name, metric in metrics.items()}
    yield compare_metrics(step, values, record.metrics, replay.tolerance)
    yield from check_state_after(replay, progress, trained)


# Samples


def check_samples(replay: Replay, progress: Progress, algorithm: Algorithm) -> Iterator[Finding]:
    """Sample the step's rollout again, and compare prompts, tokens, log-probabilities and rewards."""
    record, replayer, step = replay.record, replay.replayer, replay.step
    rollout, rollouter, run = record.rollout, replayer.resources.rollouter, replay.run
    wrong_seeds = {g.spec.key[0] for g in rollout.groups} - {run.seed}
    if wrong_seeds:
        seeds = ", ".join(map(str, sorted(wrong_seeds)))
        yield differs("samples", f"they were sampled with seed {seeds}, and run.toml has seed {run.seed}", step)
        return
    if "sampler" in record.values_after.get("python_arguments", ()):
        yield not_checked("samples", "the sampler was given to the run as an object in Python", step)
        return
    if progress.queued_rollouts:
        yield from _compare_rollouts(progress.queued_rollouts[0], rollout, step, "the rollout in the checkpoint before")
        yield not_checked("samples", "they were sampled before the state that is kept, by older weights", step)
        return
    if run.sampler.engine != LOCAL:
        yield not_checked("samples", f"{run.sampler.engine} does not return the same tokens again", step)
        return
    if not replay.is_exact:
        yield not_checked("samples", "rounding differs on this machine, so other tokens may be sampled", step)
        return
    config = RolloutConfig(run.sampling, run.prompts_per_step, replayer.config.effective_samples_per_prompt)
    request = RolloutRequest(step, progress.position, progress.leftover_groups)

    def sample() -> Rollout:
        return rollouter.collect(algorithm, config, request, evaluate=replayer.learner.evaluate)

    first = sample()
    is_repeatable = find_capabilities(rollouter.environment).is_repeatable
    bound = probe.TOLERANCE[next(replayer.resources.model.parameters()).dtype]
    tolerance = EXACT if is_repeatable else Tolerance(atol=bound)
    findings = list(_compare_rollouts(first, rollout, step, "the step repeated", tolerance))
    has_differed = any(finding.status == "differs" for finding in findings)
    if has_differed and not is_repeatable:
        reason = "the programs asked something else, or were sampled for in other batches, which round differently"
        findings = [not_checked("samples", reason, step)]
    elif has_differed:
        second = sample()
        if any(finding.status == "differs" for finding in _compare_rollouts(first, second, step, "")):
            reason = "two repetitions differ from each other: a reward or the environment is not deterministic"
            findings = [not_checked("samples", reason, step)]
    yield from findings
    if not has_differed and rollouter.score is None and replayer.resources.has_rewards:
        yield _compare_environment_rewards(first, rollout, step, sample)


def _compare_environment_rewards(
    expected: Rollout, actual: Rollout, step: int, sample: Callable[[], Rollout]
) -> Finding:
    """Compare the rewards that the environment gave to the same completions; where they differ, sample once more."""
    repeated, recorded = _list_rewards(expected), _list_rewards(actual)
    if repeated == recorded:
        return holds("rewards", f"{len(recorded)} rewards of the environment are those of the step repeated", step)
    if _list_rewards(sample()) != repeated:
        return not_checked("rewards", "the environment gives others each time", step)
    row = next(row for row, (a, b) in enumerate(zip(repeated, recorded, strict=True)) if a != b)
    text = (
        f"the environment gives completion {row} the reward {repeated[row]}, and the run trained with {recorded[row]}"
    )
    return differs("rewards", text, step)


def _list_rewards(rollout: Rollout) -> list[float | None]:
    return [trajectory.reward for group in rollout.groups for trajectory in group.trajectories]


def _compare_rollouts(
    expected: Rollout, actual: Rollout, step: int, source: str, tolerance: Tolerance = EXACT
) -> Iterator[Finding]:
    """Compare the rollout `actual`, which the run trained on, with one that should be the same."""
    keys, recorded = [g.spec.key for g in expected.groups], [g.spec.key for g in actual.groups]
    if keys != recorded:
        yield differs("prompts", _describe_keys(keys, recorded, source), step)
        return
    if any(not torch.equal(a.prompt_ids, b.prompt_ids) for a, b in zip(expected.groups, actual.groups, strict=True)):
        yield differs("prompts", f"the token ids of a prompt are not those of {source}", step)
        return
    sizes, recorded_sizes = ([len(g.trajectories) for g in x.groups] for x in (expected, actual))
    if sizes != recorded_sizes:
        group = next(i for i, (a, b) in enumerate(zip(sizes, recorded_sizes, strict=True)) if a != b)
        text = f"group {group} has {recorded_sizes[group]} completions, and {sizes[group]} in {source}"
        yield differs("prompts", text, step)
        return
    yield holds("prompts", f"{len(keys)} prompts and their order are those of {source}", step)
    a, b = batch_groups(expected.groups), batch_groups(actual.groups)
    assert a.tokens is not None
    assert b.tokens is not None
    assert a.logp_sampler is not None
    assert b.logp_sampler is not None
    width = max(a.tokens.shape[1], b.tokens.shape[1])
    tokens, recorded_tokens = (
        torch.nn.functional.pad(x, (0, width - x.shape[1]), value=-1) for x in (a.tokens, b.tokens)
    )
    if difference := explain_difference(tokens, recorded_tokens):
        text = f"tokens are not those of {source}: {difference.message}"
        yield differs("samples", text, step)
        return
    if difference := explain_difference(a.logp_sampler, b.logp_sampler, tolerance=tolerance):
        text = f"the sampler's log-probabilities are not those of {source}: {difference.message}"
        yield differs("samples", text, step, difference.error, difference.factor)
        return
    yield holds("samples", f"{int(b.lengths.sum()):,} tokens and their log-probabilities are those of {source}", step)


def _describe_keys(expected: Sequence[tuple[int, ...]], actual: Sequence[tuple[int, ...]], source: str) -> str:
    missing, added = [k for k in expected if k not in actual], [k for k in actual if k not in expected]
    if missing and not added:
        return f"{len(missing)} of {len(expected)} groups were dropped: that of example {missing[0][3]} comes first"
    if added and not missing:
        return f"{len(added)} groups are not in {source}: that of example {added[0][3]} comes first"
    if not missing and not added:
        return f"the {len(expected)} prompts are in another order than in {source}"
    return (
        f"{len(missing)} of {len(expected)} prompts are others than in {source}: example {added[0][3]} instead of "
        f"{missing[0][3]}"
    )


def check_batch(record: StepRecord, needs: frozenset[str]) -> Finding:
    """Compare the batch that was trained on with the episodes that it was made of. Needs no model."""
    batch, rollout, step = record.batch, record.rollout, record.step
    expected = batch_groups(rollout.groups, needs & {"rewards", "level", "levels", "demonstration", "observation"})
    if expected.mask.shape != batch.mask.shape:
        text = f"the batch is {list(batch.mask.shape)} and the episodes are {list(expected.mask.shape)}"
        return differs("batch", text, step)
    masked = ~batch.mask.any(1)  # by a filter
    if difference := explain_difference(expected.mask & ~masked[:, None], batch.mask):
        return differs("batch", f"mask: {difference.message}", step)
    for name in ("tokens", "group", "logp_sampler", "version", "truncated", "example_id", "positions"):
        a, b = getattr(expected, name), getattr(batch, name)
        if a is not None and (difference := explain_difference(a, b)):
            text = f"{name.replace('_', ' ')}: {difference.message}"
            return differs("batch", text, step, difference.error, difference.factor)
    prompts = zip(expected.prompts or (), batch.prompts or (), strict=False)
    if len(expected.prompts or ()) != len(batch.prompts or ()) or any(not torch.equal(a, b) for a, b in prompts):
        return differs("batch", "the prompts are not those of the episodes", step)
    if batch.token_reward is None and (difference := explain_difference(expected.reward, batch.reward)):
        return differs("batch", f"rewards: {difference.message}", step, difference.error, difference.factor)
    return holds(
        "batch", f"{len(batch.mask)} rows with {int(batch.mask.sum()):,} trained tokens are the episodes'", step
    )


def check_reference_prompts(record: StepRecord, reference: Reference, encoder: Tokenizer) -> Finding:
    """Write the prompts that π_ref reads again, from the recorded completions and their rewards."""
    batch, step = record.batch, record.step
    expected, _ = add_reference_prompts(batch, record.rollout.groups, reference, encoder)
    assert expected.has_reference is not None
    if batch.has_reference is None or len(batch.reference_prompts) != len(expected.reference_prompts):
        return differs("reference prompts", "they were not filled, and Reference.templates asks for them", step)
    if difference := explain_difference(expected.has_reference, batch.has_reference):
        return differs("reference prompts", f"has reference: {difference.message}", step)
    pairs = zip(expected.reference_prompts, batch.reference_prompts, strict=True)
    odd = [row for row, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    if odd:
        text = f"{len(odd)} of {len(batch.mask)} are not those of the templates: row {odd[0]} comes first"
        return differs("reference prompts", text, step)
    number = int(batch.has_reference.sum())
    return holds(
        "reference prompts", f"{number} of {len(batch.mask)} completions have one, each that of its template", step
    )


def check_aligned_texts(
    record: StepRecord, reference: Reference, sampling: SamplingParams, policy: Tokenizer
) -> Finding:
    """Align the recorded completions again with the tokens of a teacher with a tokenizer of its own."""
    from policygrad.rollout.aligned_teachers import add_aligned_texts, load_reference_tokenizer

    batch, step, subject = record.batch, record.step, "spans"
    assert reference.tokenizer is not None
    teacher = load_reference_tokenizer(reference.tokenizer, sampling)
    expected, _ = add_aligned_texts(batch, record.rollout.groups, policy, teacher, reference.cut)
    assert expected.reference_spans is not None
    if batch.reference_spans is None:
        return differs(subject, "they were not filled, and Reference.tokenizer asks for them", step)
    if difference := explain_difference(expected.reference_spans, batch.reference_spans):
        return differs(subject, difference.message, step)
    for field in ("reference_prompts", "reference_tokens", "reference_places"):
        ours, theirs = getattr(expected, field), getattr(batch, field)
        if len(ours) != len(theirs) or any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            return differs(subject, f"{field.replace('_', ' ')} are not those of the recorded completions", step)
    number = int((batch.reference_spans >= 0).sum())
    return holds(subject, f"{number:,} tokens are in spans of text that end with a token of both models", step)


def check_token_versions(record: StepRecord) -> Finding:
    """Check that no token claims to be sampled by weights that did not exist yet."""
    batch, step = record.batch, record.step
    if batch.version is None:
        return not_checked("versions", "the batch has no versions", step)
    versions = batch.version[batch.policy_tokens]
    if len(versions) and int(versions.max()) > record.version_before:
        text = f"a token has version {int(versions.max())}, and the learner's weights had {record.version_before}"
        return differs("versions", text, step)
    oldest = record.version_before - int(versions.min()) if len(versions) else 0
    return holds("versions", f"tokens are at most {oldest} updates older than the weights", step)


# Rewards


def check_recorded_rewards(record: StepRecord, replayer: StepReplayer) -> Iterator[Finding]:
    """Call the reward functions again on the recorded completions; each reward that is deterministic must be the same."""
    step, groups, resources = record.step, record.rollout.groups, replayer.resources
    score = resources.rollouter.score
    if score is None or not resources.has_rewards:
        reason = "the environment gives the rewards" if resources.has_rewards else "the algorithm reads no reward"
        yield not_checked("rewards", reason, step)
        return
    if not groups[0].reward_weights:
        yield not_checked(
            "rewards", "the groups are branches of other completions, without rewards of single functions", step
        )
        return
    rows = [(g, t) for g in groups for t in g.trajectories]
    names = [name for name, _ in groups[0].reward_weights]
    succeeded = torch.tensor([not t.failure for _, t in rows])

    def call() -> dict[str, list[float | None]]:
        scores = score(*reward_inputs(list(groups)))
        return scores.parts or {"reward": scores.total}

    first = call()
    second: dict[str, list[float | None]] | None = None
    for name, values in first.items():
        if name not in names:
            yield differs("rewards", f"{name} is not among the run's rewards, {', '.join(names)}", step)
            continue
        recorded = [dict(zip((n for n, _ in g.reward_weights), t.reward_parts, strict=True)).get(name) for g, t in rows]
        expected, actual = (
            torch.tensor([math.nan if x is None else x for x in column], dtype=torch.float64)
            for column in (values, recorded)
        )
        difference = explain_difference(expected, actual, succeeded, REWARD_TOLERANCE)
        if difference is None:
            yield holds("rewards", f"{name}, called again on {len(rows)} completions, gives the same values", step)
            continue
        second = second or call()
        if second[name] != values:
            yield not_checked("rewards", f"{name} is not deterministic: two calls differ from each other", step)
            continue
        yield differs("rewards", f"{name}: {difference.message}", step, difference.error, difference.factor)


# Log-probabilities


def check_sampler_weights(replay: Replay, algorithm: Algorithm) -> Finding:
    """Compare the sampler's log-probabilities with the learner's under the weights that the samples claim to be from."""
    record, step = replay.record, replay.step
    batch, learner = record.batch, replay.replayer.learner
    if batch.logp_sampler is None or batch.version is None or batch.tokens is None:
        return not_checked("sampler's weights", "the sampler reports no log-probabilities", step)
    if not bool(batch.policy_tokens.any()):
        return not_checked("sampler's weights", "the filters left no token", step)
    current = batch.policy_tokens & (batch.version == record.version_before)
    if not bool(current.any()):
        return not_checked("sampler's weights", "every token was sampled by older weights", step)
    bound = (
        replay.run.sampler.logprob_tolerance
        or probe.TOLERANCE[next(replay.replayer.resources.model.parameters()).dtype]
    )

    def scored() -> Batch:
        return learner.evaluate(replace(batch, logp_old=None), frozenset({"logp_old"}))

    def gap(scored: Batch) -> float:
        return float((scored.logp_old - batch.logp_sampler)[current].abs().max())  # type: ignore[operator]

    now = scored()
    largest = gap(now)
    number = int(current.sum())
    if largest <= bound:
        return holds(
            "sampler's weights",
            f"log-probabilities of {number:,} tokens are the learner's to {largest:.1g} nats (bound: {bound:g})",
            step,
        )
    text = f"log-probabilities are up to {largest:.2g} nats from the learner's (bound: {bound:g})"
    for saved in replay.iter_earlier():
        replay.replayer.restore(saved)
        is_cause = gap(scored()) <= bound
        replay.restore()
        if is_cause:
            return differs("sampler's weights", f"the sampler still had the weights of step {saved.step}: {text}", step)
    cause = explain_mismatch(now, bound)
    return differs("sampler's weights", f"the sampler had other weights, or reads otherwise: {text}. {cause}", step)


# Advantages and update


def _check_batch_fields(replay: Replay, trained: TrainedRollout) -> Finding:
    """Compare what the learner fills in: log-probabilities, values and so on."""
    batch, step = replay.record.batch, replay.step
    for name, expected in trained.batch.tensors().items():
        actual = getattr(batch, name)
        mask = batch.mask if name in PER_TOKEN and name != "mask" else None
        if actual is None:
            return differs("batch", f"{name} was not filled, and repeating the step fills it", step)
        if name not in (*PER_TOKEN, *PER_COMPLETION):
            continue
        if difference := explain_difference(expected, actual, mask, replay.tolerance):
            return differs("batch", f"{name}: {difference.message}", step, difference.error, difference.factor)
    return holds("batch", f"what the learner fills in is the same ({replay.tolerance})", step)


def evaluate_policy(replay: Replay) -> Batch:
    """Return the batch with the current policy's log-probabilities as `logp_old`, and its entropy if a part reads it."""
    reads = replay.run_algorithm.selection_needs | replay.run_algorithm.forward_needs
    needs = frozenset({"logp_old"}) | (reads & {"entropy"})
    return replay.replayer.learner.evaluate(replace(replay.record.batch, logp_old=None, entropy=None), needs)


def check_gradient(replay: Replay, trained: TrainedRollout, policy: Batch, where: str) -> Finding:
    """Compare the gradient per token, as a learner computes it, with that of the paper's formula in float64.

    Args:
        policy: `evaluate_policy`, at the weights for which the gradient is compared.
        where: These weights, in words.
    """
    batch, psi, algorithm, step = replay.record.batch, replay.record.psi, trained.algorithm, replay.step
    if not bool(batch.mask.any()):
        return not_checked("gradient", "the filters left no token", step)
    if unknown := algorithm.forward_needs - {"entropy"}:
        return not_checked("gradient", f"{', '.join(sorted(unknown))} is a sum over the vocabulary", step)
    if (tokens := int(batch.mask.sum())) > MAX_FORMULA_TOKENS:
        text = f"{tokens:,} tokens are many for a formula that is evaluated token by token (at most {MAX_FORMULA_TOKENS:,})"
        return not_checked("gradient", text, step)
    max_tokens = replay.run.sampling.max_tokens
    if reason := describe_departure(algorithm, max_tokens):
        return not_checked("gradient", f"the paper's formula does not apply: {reason}", step)
    logp = policy.logp_old
    assert logp is not None
    out = Forward(logp.clone().requires_grad_(), entropy=policy.entropy)
    batch = with_selected_tokens(out, batch, psi, algorithm)
    (computed,) = torch.autograd.grad(surrogate(out, batch, psi, algorithm), out.logp)
    exact_logp = logp.double().requires_grad_()
    given = batch if "entropy" not in algorithm.selection_needs else replace(batch, entropy=policy.entropy)
    try:
        objective = paper_objective(algorithm, given, exact_logp, max_tokens)
    except ConfigError as error:
        return not_checked("gradient", str(error), step)
    (exact,) = torch.autograd.grad(-objective, exact_logp)
    mask = algorithm.read_tokens(batch)  # what the environment wrote has the same derivative for every log π
    a, b = computed.double()[mask], exact[mask]
    scale = max(float(b.abs().max()), 1e-30)
    gap = (a - b).abs() / scale
    flips = (gap > GRADIENT_TOLERANCE) & ((a == 0) != (b == 0))
    if int(flips.sum()) > MAX_FLIPS * len(a) or bool((gap[~flips] > GRADIENT_TOLERANCE).any()):
        x, y = torch.zeros_like(exact), torch.zeros_like(exact)
        x[mask], y[mask] = b, a
        difference = explain_difference(x, y, mask, Tolerance(atol=GRADIENT_TOLERANCE * scale))
        difference = difference or Difference(f"by up to {float(gap.max()):.2g} of the largest")
        text = f"with respect to log-probabilities it is not that of {algorithm.name}'s formula: {difference.message}"
        return differs("gradient", text, step, difference.error, difference.factor)
    largest = float(gap[~flips].max()) if bool((~flips).any()) else 0.0
    more = f"; {int(flips.sum())} tokens lie on a bound of the gate" if bool(flips.any()) else ""
    text = f"{tokens:,} derivatives by log-probabilities, {where}, are those of {algorithm.name}'s formula in float64"
    return holds("gradient", f"{text}, to {largest:.1g} of the largest{more}", step)


def compare_metrics(
    step: int, repeated: Mapping[str, float], logged: Mapping[str, float], tolerance: Tolerance
) -> Finding:
    """Compare a step's logged metrics with those of its repetition; measures of time and machine are left out."""
    names = [name for name in repeated if name in logged and not name.startswith(UNREPEATABLE_METRICS)]
    for name in names:
        x, y = float(repeated[name]), float(logged[name])
        if not bool(tolerance.allows(torch.tensor([x]).double(), torch.tensor([y]).double())):
            return differs("metrics", f"{name} was {y:.7g}, and is {x:.7g} when the step is repeated", step)
    return holds("metrics", f"{len(names)} metrics are the same ({tolerance})", step)


def check_state_after(replay: Replay, progress: Progress, trained: TrainedRollout) -> Iterator[Finding]:
    """Compare weights, moments and the other state after the step."""
    record, step = replay.record, replay.step
    if record.undone:
        yield not_checked("weights", "the divergence guard undid the step", step)
        return
    if record.after is None:
        yield not_checked("weights", "; ".join(record.omitted) or "the state after the step was not stored", step)
        return
    tensors, values = replay.replayer.learner.state()
    differing = [name for name, digest in record.after.items() if not _matches(replay, name, tensors.get(name), digest)]
    if not differing and tensors.keys() - record.after.keys():
        differing = sorted(tensors.keys() - record.after.keys())
    number = len(record.after)
    if differing:
        cause = explain_update(replay, record.after) if replay.is_exact else ""
        kinds = "weights and moments"
        is_moment = [any(prefix in f"/{name}" for prefix in ("/adam/", "/moments/")) for name in differing]
        if all(is_moment):
            kinds = "moments of the optimizer"
        elif not any(is_moment):
            kinds = "weights"
        text = f"{len(differing)} of {number} tensors differ after the step ({kinds}; first {differing[0]})"
        yield differs("weights", f"{cause}: {text}" if cause else text, step)
    else:
        how = "bit for bit" if replay.is_exact else "within the bounds for another machine"
        yield holds("weights", f"{number} tensors of weights and moments after the step are the same {how}", step)
    state = trained.update_state(replay.run_algorithm, progress.state, replay.evaluated)
    if replay.is_exact and record.values_after.get("parts") != state:
        yield differs("state", "the state of the algorithm's parts after the step is not what repeating it gives", step)
    if values != record.values_after.get("learner") and not differing:
        yield differs("state", f"the learner counted {record.values_after.get('learner')} and counts {values}", step)


def _matches(replay: Replay, name: str, tensor: Tensor | None, digest: TensorDigest) -> bool:
    if tensor is None:
        return False
    current = digest_tensor(tensor)
    if replay.is_exact:
        return current.sha256 == digest.sha256
    if not name.startswith("weights/"):
        return abs(current.norm - digest.norm) <= MOMENT_TOLERANCE * digest.norm + 1e-12
    lr = replay.replayer.config.lr or 0.0
    bound = 2 * lr * max(1, replay.run_algorithm.update_rule.updates) + 1e-6
    gaps = [abs(x - y) for x, y in zip(current.elements, digest.elements, strict=False)]
    return len(current.elements) == len(digest.elements) and all(gap <= bound for gap in gaps)


# Steps without a record


class LoggedSteps:
    """Repeats steps that have no record, one after the other, and compares each with the run's log: a `StepCallbacks`."""

    def __init__(
        self,
        replayer: StepReplayer,
        last: int,
        rows: Mapping[int, Sequence[Mapping[str, Any]]],
        metrics: Mapping[int, Mapping[str, float]],
        states: Mapping[int, Path],
    ) -> None:
        """
        Args:
            last: Number of the last step to repeat.
            rows, metrics: The log, by step.
            states: Checkpoints by step, to compare the state with when it is reached.
        """
        self.replayer, self.last, self.rows, self.metrics, self.states = replayer, last, rows, metrics, states
        self.findings: list[Finding] = []

    def run(self, saved: Checkpoint) -> list[Finding]:
        """Repeat the steps from a checkpoint on, up to the first that differs."""
        progress, replayer = self.replayer.restore(saved), self.replayer
        run_loop(replayer.config, replayer.resources.rollouter, replayer.learner, progress, self)
        return self.findings

    def on_step(self, result: StepResult) -> StepOutcome:
        step, has_rewards = result.step, self.replayer.resources.has_rewards
        rows = build_completion_rows(result, self.replayer.resources.tokenizer.decode, has_rewards)
        self.findings.append(compare_rows(step, rows, self.rows.get(step, ())))
        values = {name: metric.value for name, metric in result.metrics.items()}
        self.findings.append(compare_metrics(step, values, self.metrics.get(step, {}), EXACT))
        if (path := self.states.get(step)) is not None:
            saved = load_checkpoint(path)
            tensors, _ = self.replayer.learner.state()
            stored = {name for name in saved.tensors if not name.startswith(("leftover/", "queued/", "rng/"))}
            differing = sorted(
                name
                for name in stored | tensors.keys()
                if name not in tensors
                or name not in stored
                or not torch.equal(tensors[name].cpu(), saved.tensors[name])
            )
            if differing:
                text = f"{len(differing)} of {len(stored)} tensors are not those of {saved.path.name}, first {differing[0]}"
                self.findings.append(differs("weights", text, step))
            else:
                text = f"{len(stored)} tensors of weights and moments are those of {saved.path.name} bit for bit"
                self.findings.append(holds("weights", text, step))
        evaluated = self.metrics.get(step, {}).get("eval/reward")
        return StepOutcome({} if evaluated is None else {"eval/reward": Mean(evaluated)})

    def should_continue(self, progress: Progress) -> bool:
        return progress.step < self.last and not any(finding.status == "differs" for finding in self.findings)


def compare_rows(step: int, repeated: Sequence[Mapping[str, Any]], logged: Sequence[Mapping[str, Any]]) -> Finding:
    """Compare the rows of completions.jsonl with those that they should be."""
    expected = [json.loads(format_row(step, row, "")) for row in repeated]
    if len(expected) != len(logged):
        return differs("completions", f"{len(logged)} are logged instead of {len(expected)}", step)
    for i, (a, b) in enumerate(zip(expected, logged, strict=True)):
        if a != b:
            name = next(name for name in {**a, **b} if a.get(name) != b.get(name))
            text = f"{name} of row {i} is logged as {_excerpt(b.get(name))} instead of {_excerpt(a.get(name))}"
            number = sum(x != y for x, y in zip(expected, logged, strict=True))
            return differs("completions", text + (f"; {number} rows differ" if number > 1 else ""), step)
    return holds("completions", f"{len(logged)} rows of the log are the same", step)


def _excerpt(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


# Causes of other weights: the step is repeated with one known fault at a time


@dataclass(frozen=True)
class FaultySteps(GradientSteps):
    """Gradient steps with a fault in one of the updates."""

    fault: str = ""
    at: int = 0  # number of the update, from 0

    def __call__(self, problem: object) -> Metrics:
        problem = require_problem(problem, GradientProblem, self)  # type: ignore[type-abstract]
        metrics, number = Metrics(), 0
        for epoch in range(self.epochs):
            minibatches = problem.split(epoch, self.minibatches)
            for i, minibatch in enumerate(minibatches):
                times = 1
                if number == self.at:
                    times = {"repeated": 2, "omitted": 0}.get(self.fault, 1)
                    if self.fault == "replaced":
                        minibatch = minibatches[i - 1]
                for _ in range(times):
                    metrics = merge(metrics, minibatch.accumulate(), minibatch.descend())
                number += 1
        return metrics


def explain_update(replay: Replay, after: Mapping[str, TensorDigest]) -> str:
    """Return the fault with which the step gives exactly the recorded weights and moments, or "" if none of those tried does."""
    for text, tensors, algorithm in _iter_faults(replay):
        replay.replayer.restore(replace(replay.saved, tensors=replay.saved.tensors | tensors))
        psi, batch = replay.record.psi, replay.record.batch
        replay.replayer.learner.update(batch, psi, algorithm)
        current, _ = replay.replayer.learner.state()
        if all(name in current and digest_tensor(current[name]).sha256 == d.sha256 for name, d in after.items()):
            return text
    return ""


def _iter_faults(replay: Replay) -> Iterator[tuple[str, dict[str, Tensor], Algorithm]]:
    """Yield (the fault as text, changed tensors of the state before, changed algorithm)."""
    _, algorithm = replay.restore()
    algorithm, _ = resolve_old_policy(algorithm, replay.record.rollout.batch, replay.replayer.learner.version)
    tensors = replay.saved.tensors
    moments = {n: torch.zeros_like(x) for n, x in tensors.items() if "adam/" in n and x.ndim}
    counters = {n: torch.zeros_like(x) for n, x in tensors.items() if "adam/" in n and not x.ndim}
    if moments:
        yield "AdamW's moments were reset before the step", moments | counters, algorithm
        yield "AdamW's moments were set to 0 before the step", moments, algorithm
    rule = algorithm.update_rule
    if type(rule) is not GradientSteps:
        return
    for at in range(min(rule.updates, MAX_TRIED_UPDATES)):
        name = f"update {at + 1} of {rule.updates}"
        texts = {
            "repeated": f"the minibatch of {name} was trained twice",
            "omitted": f"{name} was omitted",
            "replaced": f"{name} was made on the minibatch of the update before it",
        }
        for fault, text in texts.items():
            faulty = FaultySteps(rule.epochs, rule.minibatches, fault, at)
            yield text, {}, replace(algorithm, update_rule=faulty)
