"""Compare parts with the functions of other libraries on random tensors, in float64: the largest difference of each.

    scripts/compare_parts.py verl=CHECKOUT openrlhf=CHECKOUT …

The libraries are verl, skyrl, openrlhf, prime-rl, nemo, slime and ms-swift; ce-gppo and archer are the authors' code of rows. A
checkout is a git repository, with or without a work tree. Of a file only the named functions are executed, with torch and small
stand-ins for what they import, so that none of the libraries has to be installed.
"""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Optional

import torch
from torch import Tensor

import policygrad as pg
from policygrad.parts import ClipAdvantage, MarginalMax, MismatchMask, TeacherBonus

Comparison = tuple[str, Callable[[], float]]
ROWS, WIDTH, SIZE = 24, 7, 4


def main(argv: list[str]) -> int:
    checkouts = dict(word.split("=", 1) for word in argv)
    if not checkouts or not {*checkouts} <= {*LIBRARIES}:
        print(__doc__)
        return 2
    torch.set_default_dtype(torch.float64)
    worst = 0.0
    for library, checkout in checkouts.items():
        commit = _git(checkout, "rev-parse", "--short", "HEAD").strip()
        for name, compare in LIBRARIES[library](checkout):
            difference = compare()
            worst = max(worst, difference)
            print(f"{library} {commit}  {difference:8.1e}  {name}")
    return int(worst > 1e-7)  # verl and others add 1e-8 to denominators


def _git(checkout: str, *words: str) -> str:
    return subprocess.run(["git", "-C", checkout, *words], check=True, capture_output=True, text=True).stdout


def load(checkout: str, path: str, names: str, **namespace: Any) -> SimpleNamespace:
    """Execute the named functions and constants of a file, and return them."""
    tree = ast.parse(_git(checkout, "show", f"HEAD:{path}"))
    wanted = {*names.split()}
    body: list[ast.stmt] = []
    for node in tree.body:
        is_target = isinstance(node, ast.Assign | ast.AnnAssign) and wanted & {
            target.id
            for target in getattr(node, "targets", [getattr(node, "target", None)])
            if isinstance(target, ast.Name)
        }
        if is_target or (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in wanted):
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []
            body.append(node)
    found: dict[str, Any] = {"torch": torch, "math": math, "Any": Any, "defaultdict": defaultdict, **namespace}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *body], []), path, "exec"), found)
    return SimpleNamespace(**{name: found[name] for name in wanted & {*found}})  # versions have other helpers


# Random data.


def rollout(seed: int, spread: float = 0.3) -> pg.Batch:
    random = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=random, dtype=torch.float64)

    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=random)
    old = -normal(1.0).abs()
    reward = torch.randn(ROWS, generator=random, dtype=torch.float64).round(decimals=1)
    return pg.Batch(
        mask=torch.arange(WIDTH) < lengths[:, None],
        group=torch.arange(ROWS) // SIZE,
        reward=reward,
        logp_old=old,
        logp_ref=old + normal(0.5),
        logp_sampler=(old + normal(spread)).clamp(max=0),
    )


def logps(batch: pg.Batch) -> tuple[Tensor, Tensor, Tensor]:
    assert batch.logp_old is not None
    assert batch.logp_sampler is not None
    return batch.logp_old, batch.logp_sampler, batch.mask.double()


def apart(a: Tensor, b: Tensor, mask: Tensor) -> float:
    return float(((a - b) * mask).abs().max())


def over_seeds(compare: Callable[[pg.Batch], float], spread: float = 0.3) -> Callable[[], float]:
    return lambda: max(compare(rollout(seed, spread)) for seed in range(20))


def factor(batch: pg.Batch, *parts: pg.Correction) -> Tensor:
    """What corrections multiply w by, with their normalisers."""
    algorithm = replace(pg.DAPO, corrections=parts)
    x = algorithm.apply_corrections(
        torch.ones_like(batch.mask, dtype=torch.float64), pg.Forward(batch.logp_old), batch, batch.mask
    )
    for part in parts:
        if (normaliser := part.normaliser(batch)) is not None:
            x = x / normaliser
    return x


def advantages(batch: pg.Batch, *chain: pg.Advantage, **fields: Any) -> Tensor:
    return replace(pg.GRPO, advantage=chain, terms=(), **fields).compute_advantages(batch)


# verl.


def masked_mean(x: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    return (x * mask).sum(axis) / (mask.sum(axis) + 1e-8) if axis is not None else (x * mask).sum() / mask.sum()


def compare_verl(checkout: str) -> Iterator[Comparison]:
    functional = SimpleNamespace(masked_mean=masked_mean, masked_sum=lambda x, m, axis=None: (x * m).sum(axis))
    path = "verl/trainer/ppo/rollout_corr_helper.py"
    names = (
        "SAFETY_BOUND SUPPORTED_ROLLOUT_RS_OPTIONS TOKEN_LEVEL_ROLLOUT_RS_OPTIONS _parse_rollout_rs_thresholds compute_is_metrics "
        "_parse_rollout_is_threshold compute_rollout_rejection_mask compute_rs_metrics compute_rollout_correction_weights"
    )
    theirs = load(checkout, path, names, verl_F=functional)
    levels = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "any"}
    for option, bound in (
        ("token_k1", "0.8_1.3"), ("token_k2", "0.03"), ("token_k3", "0.03"),
        ("seq_sum_k1", "0.6_1.8"), ("seq_sum_k2", "0.15"), ("seq_sum_k3", "0.15"),
        ("seq_mean_k1", "0.95_1.07"), ("seq_mean_k2", "0.04"), ("seq_mean_k3", "0.04"),
        ("seq_max_k2", "0.1"), ("seq_max_k3", "0.1"),
    ):  # fmt: skip
        kind, _, estimator = option.rpartition("_")
        if estimator == "k1":
            low, high = map(float, bound.split("_"))
            part = MismatchMask("ratio", levels[kind], 1 / low, 1 / high)  # type: ignore[arg-type]
        else:
            part = MismatchMask(estimator, levels[kind], float(bound))  # type: ignore[arg-type]

        def rejection(batch: pg.Batch, option: str = option, bound: str = bound, part: pg.Correction = part) -> float:
            old, sampler, mask = logps(batch)
            kept = theirs.compute_rollout_rejection_mask(old - sampler, mask, option, bound)[0]
            return apart(kept, factor(batch, part) * mask, mask)

        yield f"rollout_rs {option}: {part.formula}", over_seeds(rejection)
    for level in ("token", "sequence"):
        for normalise in (False, True):
            weights = pg.TruncatedIS(1.5, level, normalise=normalise)  # type: ignore[arg-type]

            def weigh(
                batch: pg.Batch, level: str = level, normalise: bool = normalise, part: pg.Correction = weights
            ) -> float:
                old, sampler, mask = logps(batch)
                w = theirs.compute_rollout_correction_weights(old - sampler, mask, level, 1.5, normalise)[0]
                return apart(w, factor(batch, part), mask)

            yield f"rollout_is {level}, normalised {normalise}: {weights.formula}", over_seeds(weigh)

    core = "verl/trainer/ppo/core_algos.py"
    passk = load(checkout, core, "compute_grpo_passk_outcome_advantage").compute_grpo_passk_outcome_advantage
    for normalise in (False, True):
        chain = (MarginalMax(), pg.GroupStd(eps=1e-6)) if normalise else (MarginalMax(),)

        def lead(batch: pg.Batch, normalise: bool = normalise, chain: tuple[pg.Advantage, ...] = chain) -> float:
            config = {"norm_adv_by_std_in_grpo": normalise}
            rewards = at_last_token(batch)
            expected = passk(rewards, batch.mask.double(), batch.group.tolist(), config=config)[0]
            return apart(expected, advantages(batch, *chain), batch.mask)

        yield f"grpo_passk, normalised {normalise}: {'; '.join(link.formula for link in chain)}", over_seeds(lead)
    forward = load(checkout, core, "kl_penalty_forward").kl_penalty_forward

    def total_variation(batch: pg.Batch) -> float:
        term = pg.KLToReference(1.0, "abs")
        leaf = batch.logp_old.clone().requires_grad_()  # type: ignore[union-attr]
        theirs_ = torch.autograd.grad(forward(leaf, batch.logp_ref, "abs").sum(), leaf)[0]
        return apart(theirs_, -term.score(pg.Forward(leaf), batch, leaf), batch.mask)

    yield "kl_penalty abs: KLToReference(form='abs')", over_seeds(total_variation)
    for measure, delta in (("tv", 0.15), ("kl", 0.05)):
        gate = pg.DivergenceClip(measure, delta, c=3.0)  # type: ignore[arg-type]
        algorithm = replace(pg.DPPO, gate=gate, aggregation=pg.TokenMean(), filters=())
        config = _Config(
            clip_ratio=delta, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=3.0, global_batch_info={}
        )
        yield _compare_loss(
            checkout, f"compute_policy_loss_dppo_{measure}", algorithm, lambda loss, logp, old, psi, mask, config=config: loss(
                old, logp, psi, mask, config=config
            ), AlgoConfig=type(None), Optional=Optional, ActorConfig=dict
        )  # fmt: skip


class _Config(dict[str, Any]):
    """verl's settings, read as attributes and by `get`."""

    __getattr__ = dict[str, Any].__getitem__


def at_last_token(batch: pg.Batch) -> Tensor:
    last = torch.nn.functional.one_hot(batch.lengths - 1, WIDTH).double()
    return batch.reward[:, None] * last


# SkyRL.


def compare_skyrl(checkout: str) -> Iterator[Comparison]:
    def safe_exp_delta(x: Tensor, clip: float, out_dtype: Any) -> Tensor:
        return x.clamp(-clip, clip).exp()

    path = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
    names = "compute_tis_ratio compute_outlier_token_mask compute_token_mask compute_sequence_mask"
    theirs = load(checkout, path, names, safe_exp_delta=safe_exp_delta)
    bounds = SimpleNamespace(
        geo_mask_low=0.95, geo_mask_high=1.06, product_mask_low=0.6, product_mask_high=1.9, token_tis_ratio_clip_high=1.4,
        outlier_token_is_threshold_low=0.7, outlier_token_is_threshold_high=1.6, sequence_tis_ratio_clip_high=1.4,
        token_mask_is_threshold_low=0.8, token_mask_is_threshold_high=1.2,
    )  # fmt: skip
    for part, call in (
        (MismatchMask("ratio", "mean", 1.06, 0.95), lambda *x: theirs.compute_sequence_mask(*x, "geometric", bounds)),
        (MismatchMask("ratio", "sum", 1.9, 0.6), lambda *x: theirs.compute_sequence_mask(*x, "product", bounds)),
        (MismatchMask("ratio", "any", 1.6, 0.7), lambda *x: theirs.compute_outlier_token_mask(*x, bounds)),
        (MismatchMask("ratio", "token", 1.2, 0.8), lambda *x: theirs.compute_token_mask(*x, bounds)),
        (pg.TruncatedIS(1.4), lambda *x: theirs.compute_tis_ratio(*x, "token", bounds)),
        (pg.TruncatedIS(1.4, "sequence"), lambda *x: theirs.compute_tis_ratio(*x, "sequence", bounds)),
    ):

        def compare(batch: pg.Batch, part: pg.Correction = part, call: Any = call) -> float:
            return apart(call(*logps(batch))[0], factor(batch, part), batch.mask)

        yield f"off_policy_correction: {part.formula}", over_seeds(compare)


# OpenRLHF.


def compare_openrlhf(checkout: str) -> Iterator[Comparison]:
    def mean(x: Tensor, mask: Tensor, dim: int | None = 1) -> Tensor:
        return (x * mask).sum(dim) / mask.sum(dim)

    theirs = load(checkout, "openrlhf/models/loss.py", "aggregate_loss PolicyLoss", nn=torch.nn, masked_mean=mean)
    for kind, parts in (
        ("tis", (pg.TruncatedIS(1.3, low=0.8),)),
        ("icepop", (pg.MaskedIS(0.8, 1.3),)),
        ("seq-mask-tis", (MismatchMask("ratio", "mean", 1.3, 0.8), pg.TruncatedIS(math.inf))),
    ):
        loss = theirs.PolicyLoss(
            enable_vllm_is_correction=True, vllm_is_truncated_threshold=[0.8, 1.3], vllm_is_correction_type=kind
        )

        def compare(batch: pg.Batch, loss: Any = loss, parts: tuple[pg.Correction, ...] = parts) -> float:
            old, sampler, mask = logps(batch)
            psi = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
            leaves = [(old + 0.2 * psi.sin()).requires_grad_() for _ in range(2)]
            value = loss(leaves[0], old, psi, mask, sampler)[0]
            algorithm = replace(pg.GRPO, aggregation=pg.TokenMean(), terms=(), corrections=parts)
            ours = pg.surrogate(leaves[1], batch, psi, algorithm)
            gradients = [torch.autograd.grad(x, leaf)[0] for x, leaf in zip((value, ours), leaves, strict=True)]
            return apart(*gradients, mask)

        yield f"is_correction_type {kind}: {'; '.join(part.formula for part in parts)}", over_seeds(compare)


# prime-rl.


def compare_prime_rl(checkout: str) -> Iterator[Comparison]:
    path = "src/prime_rl/trainer/rl/loss.py"
    theirs = load(
        checkout, path, "ipo_loss_fn compute_importance_ratio_and_mismatch_kl _safe_mean LossOutputs", Tensor=Tensor,
        dataclass=__import__("dataclasses").dataclass, Float=defaultdict(str), Bool=defaultdict(str),
    )  # fmt: skip
    config = SimpleNamespace(ipo_threshold=0.05, adv_tau=1.0, kl_tau=1e-3)
    mask = MismatchMask("tv", "token", 0.05, of="current")
    algorithm = replace(pg.parts.PRIME_RL, gate=pg.Importance(), filters=(), corrections=(mask,))

    def compare(batch: pg.Batch) -> float:
        old, sampler, tokens = logps(batch)
        batch = replace(batch, logp_old=sampler)
        psi = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        leaves = [old.clone().requires_grad_() for _ in range(2)]
        inputs = SimpleNamespace(
            trainer_logprobs=leaves[0],
            inference_logprobs=sampler,
            advantages=psi,
            loss_mask=batch.mask,
            loss_weights=None,
        )
        value = theirs.ipo_loss_fn(inputs, config).loss / batch.mask.sum()
        ours = pg.surrogate(leaves[1], batch, psi, algorithm)
        return apart(*(torch.autograd.grad(x, leaf)[0] for x, leaf in zip((value, ours), leaves, strict=True)), tokens)

    yield f"ipo_loss_fn: {mask.formula}", over_seeds(compare)


# NeMo-RL.


def compare_nemo(checkout: str) -> Iterator[Comparison]:
    path, name = "nemo_rl/algorithms/utils.py", "calculate_baseline_and_std_per_prompt"
    estimate = load(checkout, path, name).calculate_baseline_and_std_per_prompt
    clip = load(checkout, "nemo_rl/algorithms/grpo.py", "_clip_grpo_advantages")._clip_grpo_advantages
    chain = (pg.LeaveOneOut(), pg.GroupStd(eps=1e-6, leave_one_out=True))

    def expected(batch: pg.Batch) -> Tensor:
        """R − baseline, divided by std + 1e-6 where the std is above 0, as GRPOAdvantageEstimator.compute_advantage has it."""
        valid = torch.ones_like(batch.reward)
        baseline, std = estimate(batch.group[:, None], batch.reward, valid, leave_one_out_baseline=True)
        psi = batch.reward - baseline
        return torch.where(std > 0, psi / (std + 1e-6), psi)[:, None].expand(batch.mask.shape)

    def score(batch: pg.Batch) -> float:
        return apart(expected(batch), advantages(batch, *chain), batch.mask)

    def clipped(batch: pg.Batch) -> float:
        bounds = SimpleNamespace(advantage_clip_low=-0.7, advantage_clip_high=0.9)
        return apart(clip(expected(batch), bounds), advantages(batch, *chain, ClipAdvantage(-0.7, 0.9)), batch.mask)

    yield f"{name}: {chain[1].formula}", over_seeds(score)
    yield "_clip_grpo_advantages: ClipAdvantage", over_seeds(clipped)


# slime and ms-swift: a teacher beside the reward.


def compare_slime(checkout: str) -> Iterator[Comparison]:
    path, name = "slime/backends/megatron_utils/loss.py", "apply_opd_kl_to_advantages"
    theirs = load(checkout, path, name).apply_opd_kl_to_advantages

    def compare(batch: pg.Batch) -> float:
        rows = list(advantages(batch, pg.GroupMean(), pg.GroupStd()))
        theirs(
            SimpleNamespace(opd_kl_coef=0.3), {"teacher_log_probs": list(batch.logp_ref)}, rows, list(batch.logp_old)
        )  # type: ignore[arg-type]
        return apart(torch.stack(rows), advantages(batch, pg.GroupMean(), pg.GroupStd(), TeacherBonus(0.3)), batch.mask)

    yield f"{name}: {TeacherBonus(0.3).formula}", over_seeds(compare)


def compare_swift(checkout: str) -> Iterator[Comparison]:
    path, name = "swift/rl_core/advantage.py", "expand_advantage_to_per_token"
    theirs = load(checkout, path, f"{name} compute_teacher_logratio")

    def compare(batch: pg.Batch) -> float:
        base = advantages(batch, pg.GroupMean(), pg.GroupStd())[:, 0]
        expected = theirs.expand_advantage_to_per_token(base, batch.mask, batch.logp_ref, batch.logp_old, 0.3)
        return apart(expected, advantages(batch, pg.GroupMean(), pg.GroupStd(), TeacherBonus(0.3)), batch.mask)

    yield f"{name}: {TeacherBonus(0.3).formula}", over_seeds(compare)


# The authors' own code of rows: https://github.com/Kwai-Klear/CE-GPPO and https://github.com/wizard-III/Archer2.0.


def compare_ce_gppo(checkout: str) -> Iterator[Comparison]:
    yield _compare_loss(checkout, "compute_gppo_loss_general_beta", pg.ALGORITHMS["ce_gppo"], lambda loss, logp, old, psi, mask:
        loss(old, logp, psi, mask, cliprange=0.2, clip_ratio_c=10.0, gppo_loss_beta1=0.75, gppo_loss_beta2=1.0)
    )  # fmt: skip


def compare_archer(checkout: str) -> Iterator[Comparison]:
    yield _compare_loss(checkout, "compute_policy_loss_archer", pg.ALGORITHMS["aspo"], lambda loss, logp, old, psi, mask: loss(
        old, logp, psi, mask.bool(), torch.ones_like(mask).bool()
    ))  # fmt: skip


def _compare_loss(
    checkout: str, name: str, algorithm: pg.Algorithm, call: Callable[..., Any], **namespace: Any
) -> Comparison:
    """The gradient of an algorithm, without terms and filters, for any Ψ and ratios far from 1."""

    def agg_loss(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str) -> Tensor:
        return (loss_mat * loss_mask).sum() / loss_mask.sum()

    functional = SimpleNamespace(masked_mean=masked_mean)
    theirs = load(checkout, "verl/trainer/ppo/core_algos.py", name, verl_F=functional, agg_loss=agg_loss, **namespace)
    algorithm = replace(algorithm, terms=(), filters=())

    def compare(batch: pg.Batch) -> float:
        old, sampler, mask = logps(batch)
        psi = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
        leaves = [sampler.clone().requires_grad_() for _ in range(2)]
        value = call(getattr(theirs, name), leaves[0], old, psi, mask)[0]
        ours = pg.surrogate(leaves[1], batch, psi, algorithm)
        return apart(
            *(torch.autograd.grad(x, leaf)[0] for x, leaf in zip((value, ours), leaves, strict=True)), mask=mask
        )

    return f"{name}: {algorithm.name}", over_seeds(compare, spread=1.5)


LIBRARIES: dict[str, Callable[[str], Iterator[Comparison]]] = {
    "verl": compare_verl,
    "skyrl": compare_skyrl,
    "openrlhf": compare_openrlhf,
    "prime-rl": compare_prime_rl,
    "nemo": compare_nemo,
    "slime": compare_slime,
    "ms-swift": compare_swift,
    "ce-gppo": compare_ce_gppo,
    "archer": compare_archer,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
