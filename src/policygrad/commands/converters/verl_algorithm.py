"""verl's algorithms: estimators, losses, penalties, filters and corrections as the parts of one here."""

from __future__ import annotations

from collections.abc import Iterator

from policygrad.commands.converters.base import Left, Line, Options, Outcome
from policygrad.commands.converters.verl_corrections import CORRECTION
from policygrad.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
ESTIMATORS = {  # adv_estimator -> the algorithm here
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "grpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "gdpo": "gdpo",
    "optimal_token_baseline": "otb",
    "tir_optimal_token_baseline": "otb",
}
LOSSES = {  # loss_mode with the estimator grpo -> the algorithm here
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}
AGGREGATIONS = {
    "token-mean": "TokenMean",
    "seq-mean-token-sum": "SequenceSum",
    "seq-mean-token-mean": "SequenceMean",
    "seq-mean-token-sum-norm": "FixedLength",
}
FORMS = {
    "low_var_kl": "k3",
    "k3": "k3",
    "mse": "k2",
    "k2": "k2",
    "k1+": "k2",
    "kl+": "k2",
    "abs": "abs",
    "abs+": "k2",
    "k3+": "k2",
    "low_var_kl+": "k2",
}
"""kl_loss_type -> the form here. With + verl takes k2's gradient, whatever is shown."""
GROUPS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "gdpo",
    "reinforce_plus_plus_baseline",
)


def answer_algorithm(options: Options) -> Iterator[Outcome]:
    """The algorithm, by its estimator and its loss, with the advantage."""
    name, mode = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"
    estimator, loss = options.text(name).lower(), options.text(mode).lower()
    if estimator not in ESTIMATORS:
        raise ConfigError(
            f"{name}={estimator} has no equivalent here: known are {', '.join(ESTIMATORS)}. Convert with one of them, and write "
            "the advantage yourself ([algorithm] advantage)"
        )
    base = (
        LOSSES.get(loss, ESTIMATORS[estimator]) if estimator in ("grpo", "grpo_passk", "gpg") else ESTIMATORS[estimator]
    )
    sources = (name, mode) if mode in options else (name,)
    note = "its multi-turn form has no equivalent" if estimator.startswith("tir_") else ""
    yield Line("algorithm.name", base, sources, note)
    yield from _answer_advantage(options, estimator)
    yield from _answer_loss(options, loss)


def _answer_advantage(options: Options, estimator: str) -> Iterator[Outcome]:
    source, std = ("algorithm.adv_estimator",), "algorithm.norm_adv_by_std_in_grpo"
    if estimator in GROUPS and options.count(f"{ROLLOUT}.n") == 1:
        note, sources = "of a single completion verl takes the score itself", (*source, f"{ROLLOUT}.n")
        if estimator == "reinforce_plus_plus_baseline":
            yield Line("algorithm.advantage.Whiten", None, sources, note)
        else:
            yield Line("algorithm.advantage", [], sources, note)
    elif estimator in ("grpo", "grpo_vectorized"):
        yield Line("algorithm.advantage.GroupMean", None, source)
        if options.flag(std):
            yield Line("algorithm.advantage.GroupStd", None, (std,))
            yield Line("algorithm.advantage.GroupStd.eps", 1e-6, (std,), "verl's")
    elif estimator == "grpo_passk":
        yield Line("algorithm.advantage.MarginalMax", None, source)
        if options.flag(std):
            yield Line("algorithm.advantage.GroupStd", None, (std,))
            yield Line("algorithm.advantage.GroupStd.eps", 1e-6, (std,), "verl's")
    elif estimator == "gae":
        for key in ("gamma", "lam"):
            yield options.number_line(f"algorithm.advantage.GAE.{key}", f"algorithm.{key}")
            yield options.number_line(f"algorithm.critic.{key}", f"algorithm.{key}")
        yield Line("algorithm.advantage.Whiten", None, source)
    if estimator not in ("grpo", "grpo_vectorized", "grpo_passk") and std in options:
        yield Left(std, f"is for grpo, and the estimator is {estimator}")
    if estimator != "gae":
        discount = options.number("algorithm.gamma")
        for key in ("algorithm.gamma", "algorithm.lam"):
            if key in options:
                why = "rewards are not discounted here without a critic" if discount != 1 else f"{estimator} has none"
                yield Left(key, why)


def _answer_loss(options: Options, loss: str) -> Iterator[Outcome]:
    """Ratio, gate and aggregation."""
    mode, source = f"{ACTOR}.policy_loss.loss_mode", (f"{ACTOR}.policy_loss.loss_mode",)
    aggregation = f"{ACTOR}.loss_agg_mode"
    kind = options.text(aggregation)
    if loss in ("gspo", "sapo", "geo_mean"):  # verl has these whatever the option says
        yield Line("algorithm.aggregation", "SequenceMean", source)
        if aggregation in options:
            yield Left(aggregation, f"{loss} takes the mean over a completion, then over completions, in verl too")
    elif kind in AGGREGATIONS:
        yield Line("algorithm.aggregation", AGGREGATIONS[kind], (aggregation,))
    else:
        raise ConfigError(f"{aggregation}={kind} has no equivalent here: known are {', '.join(AGGREGATIONS)}")
    if loss == "sapo":
        yield Line("algorithm.ratio", "Token", source)
        yield Line("algorithm.gate", "SigmoidGate", source)
        yield options.number_line("algorithm.gate.tau_pos", f"{ACTOR}.tau_pos")
        yield options.number_line("algorithm.gate.tau_neg", f"{ACTOR}.tau_neg")
        return
    if loss == "gpg":  # no ratio, also after the first minibatch
        yield Line("algorithm.ratio", "Token", source)
        yield Line("algorithm.gate", "UnitWeight", source)
        return
    if options.flag(f"{CORRECTION}.bypass_mode") and options.text(f"{CORRECTION}.loss_type") == "reinforce":
        yield from _answer_reinforce(options)
        return
    if loss == "kl_cov":
        yield Line("algorithm.ratio", "Token", source)
        yield Line("algorithm.gate", "Importance", source)
        return
    yield Line("algorithm.ratio", "Sequence" if loss == "gspo" else "Token", source)
    if loss in ("dppo_tv", "dppo_kl"):
        yield from _answer_divergence_clip(options, loss)
    else:
        yield from _answer_clip(options, loss, mode)


def _answer_reinforce(options: Options) -> Iterator[Outcome]:
    """The loss without a clip: −w·Ψ·log π_θ, w the ratio to the sampler up to a bound."""
    kind, threshold = f"{CORRECTION}.loss_type", f"{CORRECTION}.rollout_is_threshold"
    level = options.text(f"{CORRECTION}.rollout_is")
    yield Line("algorithm.ratio", "SequenceProduct" if level == "sequence" else "Token", (f"{CORRECTION}.rollout_is",))
    if not level:
        yield Line("algorithm.gate", "UnitWeight", (kind,))
        return
    yield Line("algorithm.gate", "ClippedImportance", (kind,))
    yield Line("algorithm.gate.low", 0.0, (kind,))
    yield options.number_line("algorithm.gate.high", threshold)


def _answer_divergence_clip(options: Options, loss: str) -> Iterator[Outcome]:
    source, low, high = (
        f"{ACTOR}.policy_loss.loss_mode",
        *(options.first(f"{ACTOR}.clip_ratio_{side}", f"{ACTOR}.clip_ratio") for side in ("low", "high")),
    )
    if options.number(low) != options.number(high):
        raise ConfigError(
            f"{low} and {high} differ with {loss}, and the bound on the divergence is one for both sides here: give them one value"
        )
    yield Line("algorithm.gate", "DivergenceClip", (source,))
    yield Line("algorithm.gate.measure", loss.removeprefix("dppo_"), (source,))
    yield Line("algorithm.gate.delta", float(options.number(high)), (low, high), "a divergence, no ratio, in verl too")
    yield options.number_line("algorithm.gate.c", f"{ACTOR}.clip_ratio_c")
    if not options.flag(f"{CORRECTION}.bypass_mode"):
        yield Line("algorithm.old_policy", "learner", (source,), "without bypass_mode verl computes log π_old itself")


def _answer_clip(options: Options, loss: str, mode: str) -> Iterator[Outcome]:
    gates = {"geo_mean": "GeometricMean", "cispo": "ClippedImportance", "clip_cov": "ClipCov"}
    yield Line("algorithm.gate", gates.get(loss, "Clip"), (mode,))
    known = ("vanilla", "gspo", *gates)
    if loss not in known:
        yield Left(mode, f"{loss} has no equivalent: the clip stands for it")
    low, high = (options.first(f"{ACTOR}.clip_ratio_{side}", f"{ACTOR}.clip_ratio") for side in ("low", "high"))
    if loss == "clip_cov":
        own = f"{ACTOR}.policy_loss.clip_cov"
        for key, name in (("fraction", "ratio"), ("cov_low", "lb"), ("cov_high", "ub")):
            yield options.number_line(f"algorithm.gate.{key}", f"{own}_{name}")
        low, high = (options.first(f"{ACTOR}.clip_ratio_{side}", f"{ACTOR}.clip_ratio") for side in ("low", "high"))
    shift = (1, -1) if loss == "cispo" else (0, 1)  # cispo's bounds are those of the ratio itself
    bounds = (shift[0] + shift[1] * options.number(low), shift[0] + options.number(high))
    note = "the bound itself, 1 ± verl's" if loss == "cispo" else ""
    yield Line("algorithm.gate.low", max(0.0, float(f"{bounds[0]:.12g}")), (low,), note)
    yield Line("algorithm.gate.high", float(f"{bounds[1]:.12g}"), (high,), note)
    if f"{ACTOR}.clip_ratio" in options and f"{ACTOR}.clip_ratio" not in (low, high):
        yield Left(f"{ACTOR}.clip_ratio", "clip_ratio_low and clip_ratio_high are set")
    bound = f"{ACTOR}.clip_ratio_c"
    if loss == "vanilla" or loss not in known:
        yield options.number_line("algorithm.gate.c", bound)
    elif bound in options:
        yield Left(bound, f"{loss} has no dual clip, in verl too")


def answer_kl(options: Options) -> Iterator[Outcome]:
    """The KL in the loss and in the reward, and the entropy."""
    use, coefficient, kind = f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"
    terms = False
    if options.flag(use):
        form = FORMS.get(options.text(kind))
        if form is None:
            yield Left(
                kind,
                "k1 in the loss has an expected gradient of 0, and is refused here: the loss has no KL; k2 has its gradient",
            )
        elif options.number(coefficient) > 0:
            terms = True
            yield Line("algorithm.terms.KLToReference", None, (use,))
            yield options.number_line("algorithm.terms.KLToReference.beta", coefficient)
            yield Line("algorithm.terms.KLToReference.form", form, (kind,))
    entropy = f"{ACTOR}.entropy_coeff"
    if (eta := options.number(entropy)) != 0:
        terms = True
        yield Line("algorithm.terms.ExactEntropy", None, (entropy,))
        yield Line("algorithm.terms.ExactEntropy.eta", float(eta), (entropy,))
    is_single = options.get("data.train_batch_size") == options.get(f"{ACTOR}.ppo_mini_batch_size")
    if (
        options.text(f"{ACTOR}.policy_loss.loss_mode") == "kl_cov"
        and is_single
        and options.get(f"{ACTOR}.ppo_epochs") == 1
    ):
        yield Left(f"{ACTOR}.policy_loss.loss_mode", "its KL to π_old is 0 at a rollout's only update")
    elif options.text(f"{ACTOR}.policy_loss.loss_mode") == "kl_cov":
        own = f"{ACTOR}.policy_loss"
        terms = True
        yield Line("algorithm.terms.KLCov", None, (f"{own}.loss_mode",))
        yield options.number_line("algorithm.terms.KLCov.beta", f"{own}.ppo_kl_coef")
        yield options.number_line("algorithm.terms.KLCov.fraction", f"{own}.kl_cov_ratio")
    if not terms:
        yield Line("algorithm.terms", [], (use, entropy) if entropy in options else (use,))
    elif entropy in options and eta == 0:
        yield Left(entropy, "no entropy bonus, as here")


def answer_shaping(options: Options) -> Iterator[Outcome]:
    """What is added to the reward: the KL, the overlong penalty."""
    use, kl, shaping = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl", False
    if options.flag(use) and options.number(f"{kl}.kl_coef") > 0:
        shaping = True
        yield Line("algorithm.shaping.KLInReward", None, (use,))
        yield options.number_line("algorithm.shaping.KLInReward.beta", f"{kl}.kl_coef")
        if options.text("algorithm.adv_estimator") in GROUPS:
            note = "an estimator of whole completions"
            yield Line("algorithm.shaping.KLInReward.level", "sequence", ("algorithm.adv_estimator",), note)
        if options.text(f"{kl}.type") == "adaptive":
            target = f"{kl}.target_kl"
            note = "changes by at most 2 % per rollout, as with a horizon of ten rollouts' samples"
            yield Line(
                "algorithm.shaping.KLInReward.target", float(options.number(target)), (target, f"{kl}.type"), note
            )
        penalty = "algorithm.kl_penalty"
        if options.text(penalty) not in ("kl", "k1"):
            yield Left(penalty, "k1 here: other forms in the reward are not the KL's gradient")
    buffer = OVERLONG if f"{OVERLONG}.enable" in options else "reward_model.overlong_buffer"
    if options.flag(f"{buffer}.enable"):
        shaping = True
        length = options.number(f"{buffer}.len") / options.positive("data.max_response_length")
        yield Line("algorithm.shaping.SoftOverlong", None, (f"{buffer}.enable",))
        note = f"a fraction of {options.count('data.max_response_length')} tokens"
        yield Line("algorithm.shaping.SoftOverlong.cache", float(f"{min(length, 1.0):.6g}"), (f"{buffer}.len",), note)
        factor = f"{buffer}.penalty_factor"
        yield Line(
            "algorithm.shaping.SoftOverlong.scale",
            float(options.number(factor)) if options.get(factor) is not None else 1.0,
            (factor,),
        )
    if not shaping:
        yield Line("algorithm.shaping", [], (use,))


def answer_filters(options: Options) -> Iterator[Outcome]:
    """Dynamic sampling."""
    name = "algorithm.filter_groups"
    if options.text("algorithm.adv_estimator") == "gpg" and options.count(f"{ROLLOUT}.n") > 1:
        note = "1/(1 − the fraction of equal groups), the paper's; verl multiplies by completions / those with a score"
        yield Line("algorithm.filters.DropZeroVariance", None, ("algorithm.adv_estimator",), note)
        yield Line("algorithm.filters.DropZeroVariance.mode", "reweight", ("algorithm.adv_estimator",))
        return
    if options.flag(f"{name}.enable") and options.count(f"{ROLLOUT}.n") == 1:
        yield Left(f"{name}.enable", "a single completion per prompt has nothing to be compared with")
        yield Line("algorithm.filters", [], (f"{name}.enable",))
        return
    if not options.flag(f"{name}.enable"):
        yield Line("algorithm.filters", [], (f"{name}.enable",) if f"{name}.enable" in options else ())
        return
    yield Line("algorithm.filters.DropZeroVariance", None, (f"{name}.enable",), "by the scores, whatever the metric")
    if f"{name}.metric" in options:
        yield Left(f"{name}.metric", "groups are filtered by the task's scores, before any shaping")
    rounds = f"{name}.max_num_gen_batches"
    if rounds in options and options.count(rounds) > 0:
        yield options.count_line("algorithm.filters.DropZeroVariance.max_rounds", rounds)
