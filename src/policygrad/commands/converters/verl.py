"""verl: hydra overrides of `python3 -m verl.trainer.main_ppo`, or the YAML of its configuration.

Defaults are those of verl at b178a3c (verl/trainer/config: ppo_trainer.yaml, actor.yaml, rollout.yaml, optim/fsdp.yaml).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policygrad.commands.converters.base import (
    IMPLIED,
    Left,
    Library,
    Line,
    Need,
    Options,
    Outcome,
    Rule,
    Setting,
    as_list,
    flatten,
    parse_value,
    ratio_up,
)
from policygrad.errors import ConfigError

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
OPTIM = f"{ACTOR}.optim"
CORRECTION = "algorithm.rollout_correction"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
DEFAULTS = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "data.train_batch_size": 1024,
    "data.max_response_length": 512,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.tau_neg": 1.05,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.policy_loss.clip_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 5.0,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": 0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{OPTIM}.lr": 1e-6,
    f"{OPTIM}.lr_warmup_steps": -1,
    f"{OPTIM}.lr_warmup_steps_ratio": 0.0,
    f"{OPTIM}.weight_decay": 0.01,
    f"{OPTIM}.betas": [0.9, 0.999],
    f"{OPTIM}.clip_grad": 1.0,
    f"{OPTIM}.lr_scheduler_type": "constant",
    "critic.cliprange_value": 0.5,
    "critic.optim.lr": 1e-5,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.name": "",
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.top_p": 1.0,
    f"{ROLLOUT}.free_cache_engine": True,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
    "trainer.total_epochs": 30,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.logger": ["console", "wandb"],
    "reward_model.enable": False,
    "custom_reward_function.name": "compute_score",
    f"{OVERLONG}.penalty_factor": 1.0,
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.loss_type": "ppo_clip",
}
ESTIMATORS = {  # adv_estimator -> the algorithm here
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
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
    "k3+": "k2",
    "low_var_kl+": "k2",
}
"""kl_loss_type -> the form here. With + verl takes k2's gradient, whatever is shown."""
GROUPS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline")


def read_overrides(words: Sequence[tuple[str, int]]) -> list[Setting]:
    """Return the options of a command's overrides, (text, line) each. Raises ConfigError for one that is none."""
    settings: list[Setting] = []
    skips = False
    for word, line in words:
        place = f"line {line}: " if line else ""
        if (
            skips or not word.strip() or word.startswith("$")
        ):  # the value of --config-name NAME; arguments that are passed on
            skips = False
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            skips = not equals
            settings.append(Setting(f"--{name[2:]}", value, word, line))
        elif word.startswith("~"):
            name = word[1:].partition("=")[0]
            settings = [setting for setting in settings if setting.name != name]
        elif found := re.fullmatch(r"\+{0,2}([\w@/-]+(?:\.[\w@-]+)*)=(.*)", word, re.DOTALL):
            settings.append(Setting(found[1], parse_value(found[2]), word.strip("+"), line))
        elif word != ";":
            raise ConfigError(f"{place}{word!r} is not an override of verl: write it as name.of.option=value")
        else:
            break
    return settings


def read_tables(data: Mapping[str, Any]) -> list[Setting]:
    """Return the options of verl's YAML. What follows another option, `${…}`, is left to it."""
    pairs = [
        (name, value) for name, value in flatten(data) if not re.search(r"(^|\.)_target_$|^defaults$|^hydra\.", name)
    ]
    pairs = [(name, value) for name, value in pairs if not (isinstance(value, str) and "${" in value)]
    pairs = [(name, parse_value(value) if isinstance(value, str) else value) for name, value in pairs]
    return [Setting(name, value, f"{name}={value}") for name, value in pairs if value is not None and value != {}]


def answer_algorithm(options: Options) -> Iterator[Outcome]:
    """The algorithm, by its estimator and its loss, with the advantage."""
    name, mode = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"
    estimator, loss = options.text(name).lower(), options.text(mode).lower()
    if estimator not in ESTIMATORS:
        raise ConfigError(
            f"{name}={estimator} has no equivalent here: known are {', '.join(ESTIMATORS)}. Convert with one of them, and write "
            "the advantage yourself ([algorithm] advantage)"
        )
    base = LOSSES.get(loss, ESTIMATORS[estimator]) if estimator in ("grpo", "gpg") else ESTIMATORS[estimator]
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
    elif estimator == "gae":
        for key in ("gamma", "lam"):
            yield Line(
                f"algorithm.advantage.GAE.{key}", float(options.number(f"algorithm.{key}")), (f"algorithm.{key}",)
            )
            yield Line(f"algorithm.critic.{key}", float(options.number(f"algorithm.{key}")), (f"algorithm.{key}",))
        yield Line("algorithm.advantage.Whiten", None, source)
    if estimator not in ("grpo", "grpo_vectorized") and std in options:
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
        yield Line("algorithm.gate.tau_pos", float(options.number(f"{ACTOR}.tau_pos")), (f"{ACTOR}.tau_pos",))
        yield Line("algorithm.gate.tau_neg", float(options.number(f"{ACTOR}.tau_neg")), (f"{ACTOR}.tau_neg",))
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
    yield Line("algorithm.gate.high", float(options.number(threshold)), (threshold,))


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
            yield Line(f"algorithm.gate.{key}", float(options.number(f"{own}_{name}")), (f"{own}_{name}",))
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
        yield Line("algorithm.gate.c", float(options.number(bound)), (bound,))
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
            yield Line("algorithm.terms.KLToReference.beta", float(options.number(coefficient)), (coefficient,))
            yield Line("algorithm.terms.KLToReference.form", form, (kind,))
    entropy = f"{ACTOR}.entropy_coeff"
    if (eta := options.number(entropy)) != 0:
        terms = True
        yield Line("algorithm.terms.ExactEntropy", None, (entropy,))
        yield Line("algorithm.terms.ExactEntropy.eta", float(eta), (entropy,))
    if options.text(f"{ACTOR}.policy_loss.loss_mode") == "kl_cov":
        own = f"{ACTOR}.policy_loss"
        terms = True
        yield Line("algorithm.terms.KLCov", None, (f"{own}.loss_mode",))
        yield Line("algorithm.terms.KLCov.beta", float(options.number(f"{own}.ppo_kl_coef")), (f"{own}.ppo_kl_coef",))
        yield Line(
            "algorithm.terms.KLCov.fraction", float(options.number(f"{own}.kl_cov_ratio")), (f"{own}.kl_cov_ratio",)
        )
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
        yield Line("algorithm.shaping.KLInReward.beta", float(options.number(f"{kl}.kl_coef")), (f"{kl}.kl_coef",))
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
    if options.text("algorithm.adv_estimator") == "gpg":
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
        yield Line("algorithm.filters.DropZeroVariance.max_rounds", options.count(rounds), (rounds,))


def answer_corrections(options: Options) -> Iterator[Outcome]:
    """Weights for the difference between engine and learner."""
    ratio, rejection = options.text(f"{CORRECTION}.rollout_is"), options.text(f"{CORRECTION}.rollout_rs")
    bypass = options.flag(f"{CORRECTION}.bypass_mode")
    parts, normalize = 0, f"{CORRECTION}.rollout_is_batch_normalize"
    if normalize in options and options.flag(normalize):
        yield Left(normalize, "weights are not normalised to a mean of 1")
    if bypass:  # π_old is the sampler's policy, and nothing is left to correct
        yield Line("algorithm.old_policy", "sampler", (f"{CORRECTION}.bypass_mode",))
        yield Line("algorithm.corrections", [], (f"{CORRECTION}.bypass_mode",))
        if rejection not in ("", "null"):
            yield Left(
                f"{CORRECTION}.rollout_rs",
                "with the sampler's log-probabilities as π_old the gate bounds the ratio; none is rejected",
            )
        return
    if ratio in ("token", "sequence"):
        threshold = f"{CORRECTION}.rollout_is_threshold"
        parts += 1
        yield Line("algorithm.corrections.TruncatedIS", None, (f"{CORRECTION}.rollout_is",))
        yield Line("algorithm.corrections.TruncatedIS.cap", float(options.number(threshold)), (threshold,))
        yield Line("algorithm.corrections.TruncatedIS.level", ratio, (f"{CORRECTION}.rollout_is",))
    kinds = {"token_k1": "token", "seq_sum_k1": "sequence"}
    bounds = re.fullmatch(r"([\d.]+)_([\d.]+)", options.text(f"{CORRECTION}.rollout_rs_threshold").partition(",")[0])
    kind = kinds.get(rejection.partition(",")[0])
    if kind and bounds:
        parts += 1
        note = "of several, the first" if "," in rejection else ""
        yield Line("algorithm.corrections.MaskedIS", None, (f"{CORRECTION}.rollout_rs",), note)
        yield Line("algorithm.corrections.MaskedIS.low", float(bounds[1]), (f"{CORRECTION}.rollout_rs_threshold",))
        yield Line("algorithm.corrections.MaskedIS.high", float(bounds[2]), (f"{CORRECTION}.rollout_rs_threshold",))
        yield Line("algorithm.corrections.MaskedIS.level", kind, (f"{CORRECTION}.rollout_rs",))
    elif rejection:
        yield Left(f"{CORRECTION}.rollout_rs", f"of verl's rejections only {' and '.join(kinds)} have an equivalent")
    if not parts:
        yield Line("algorithm.corrections", [], ())


def answer_batches(options: Options) -> Iterator[Outcome]:
    """Prompts, completions, minibatches, steps and the schedule, which is counted in optimizer steps."""
    prompts, mini = options.positive("data.train_batch_size"), options.positive(f"{ACTOR}.ppo_mini_batch_size")
    minibatches, rounded = ratio_up(prompts, mini)
    epochs, samples = options.positive(f"{ACTOR}.ppo_epochs"), options.positive(f"{ROLLOUT}.n")
    yield Line("prompts_per_step", prompts, ("data.train_batch_size",))
    yield Line("samples_per_prompt", samples, (f"{ROLLOUT}.n",))
    sources = ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    yield Line("algorithm.update_rule", "GradientSteps", ())
    yield Line("algorithm.update_rule.minibatches", minibatches, sources, rounded)
    yield Line("algorithm.update_rule.epochs", epochs, (f"{ACTOR}.ppo_epochs",))
    steps, passes = "trainer.total_training_steps", "trainer.total_epochs"
    length = None
    if options.get(steps) is not None:
        length = options.count(steps)
        yield Line("steps", length, (steps,))
        if passes in options:
            yield Left(passes, "trainer.total_training_steps sets the length")
    elif options.rows is not None:
        length = max(1, options.rows // prompts * options.count(passes))
        yield Line("steps", length, (passes,), f"of {options.rows} rows, {prompts} a step")
    else:
        text = f"steps = {options.count(passes)} × rows of the training data / {prompts}; --rows N tells the rows"
        yield Need(text, (passes,))
    yield from _answer_warmup(options, length, minibatches * epochs)


def _answer_warmup(options: Options, length: int | None, updates: int) -> Iterator[Outcome]:
    name, ratio = f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio"
    style = options.first(f"{OPTIM}.warmup_style", f"{OPTIM}.lr_decay_style", f"{OPTIM}.lr_scheduler_type")
    if (warmup := options.count(name)) > 0:
        note = f"optimizer steps, {updates} a rollout" if updates > 1 else ""
        yield Line("optimizer.warmup", warmup * updates, (name,), note)
    elif (share := options.number(ratio)) > 0 and length is not None:
        yield Line(
            "optimizer.warmup", round(share * length * updates), (ratio,), f"of {length * updates} optimizer steps"
        )
    elif share > 0:
        yield Need(f"optimizer.warmup = {share:g} × steps × {updates}, once you know the steps", (ratio,))
    schedule = options.text(style)
    if schedule in ("constant", "cosine", "linear"):
        yield Line("optimizer.schedule", schedule, (style,))
    else:
        yield Left(style, f"{schedule} has no equivalent: constant, linear or cosine")
    for key in (
        f"{OPTIM}.min_lr_ratio",
        f"{OPTIM}.num_cycles",
        f"{OPTIM}.lr_decay_steps",
        f"{OPTIM}.total_training_steps",
    ):
        if key in options:
            yield Left(key, "a schedule ends at 0, at the run's last update")


def answer_optimizer(options: Options) -> Iterator[Outcome]:
    """Clipping, decay and betas, which differ from those here."""
    clip = options.first(f"{ACTOR}.grad_clip", f"{OPTIM}.clip_grad")
    yield Line("lr", float(options.number(f"{OPTIM}.lr")), (f"{OPTIM}.lr",))
    yield Line("optimizer.clip", float(options.number(clip)), (clip,))
    yield Line("optimizer.weight_decay", float(options.number(f"{OPTIM}.weight_decay")), (f"{OPTIM}.weight_decay",))
    yield Line("optimizer.betas", [*options.pair(f"{OPTIM}.betas")], (f"{OPTIM}.betas",))


def answer_program(options: Options) -> Iterator[Outcome]:
    """A program of its own beside verl's, such as a recipe's."""
    program = options.text(IMPLIED)
    if "one_step_off" in program or "fully_async" in program:
        yield Need(
            f"max_staleness: {program} samples while it learns; --max-staleness 1 is one step ahead, on GPUs of its own"
        )
    elif program and not re.search(r"(^|[./])main_(ppo|dapo)(\.py)?$", program):
        yield Need(f"{program} has code of its own beside verl's: only its options were converted")


def answer_critic(options: Options) -> Iterator[Outcome]:
    """The critic of gae; other estimators have none."""
    critic = [name for name in options.given if name.startswith("critic.") or name == "trainer.critic_warmup"]
    if options.text("algorithm.adv_estimator") != "gae":
        for name in critic:
            yield Left(name, f"{options.text('algorithm.adv_estimator')} has no critic")
        return
    yield Line("algorithm.critic.lr", float(options.number("critic.optim.lr")), ("critic.optim.lr",))
    clip = "critic.cliprange_value"
    yield Line("algorithm.critic.clip", float(options.number(clip)), (clip,))
    if "trainer.critic_warmup" in options:
        pretrain = options.count("trainer.critic_warmup")
        note = "at most; ends once the critic explains enough variance"
        yield Line("algorithm.critic.pretrain", pretrain, ("trainer.critic_warmup",), note if pretrain else "")
    for name in critic:
        if name == "critic.model.path":
            yield Left(name, "the critic starts as a copy of the policy")
        elif name not in ("critic.optim.lr", clip, "trainer.critic_warmup"):
            yield Left(name, "the critic is trained with the policy's batches, memory and schedule")


def answer_data(options: Options) -> Iterator[Outcome]:
    """Data and rewards."""
    for name, key in (("data.train_files", "task"), ("data.val_files", "eval_data")):
        files = [str(file) for file in as_list(options.get(name))]
        if files:
            note = "drawn from equally often; weights: 0.7*a+0.3*b" if len(files) > 1 else ""
            yield Line(key, "+".join(files), (name,), note)
    if "data.train_files" not in options:
        yield Need('task: verl\'s own is ~/data/rlhf/gsm8k/train.parquet; a dataset of the hub is task = "hf:NAME"')
    path, function = "custom_reward_function.path", "custom_reward_function.name"
    if options.text(path):
        ending = f":{options.text(function)}" if function in options else ""
        yield Line("reward", [f"verl:{options.text(path)}{ending}"], (path, function) if ending else (path,))
    elif options.flag("reward_model.enable") and options.text("reward_model.model.path"):
        name = "reward_model.model.path"
        yield Line("reward", [f"model:{options.text(name)}"], (name, "reward_model.enable"))
        for other in options.given:
            if other.startswith("reward_model.") and other not in (
                name,
                "reward_model.enable",
                "reward_model.reward_manager",
            ):
                yield Left(other, "a reward model runs in a worker of its own; no placement is chosen")
    else:
        yield Line(
            "reward", ["math"], (), "verl chooses by the column data_source; math compares answers as mathematics"
        )
        yield Need(
            "reward: math is right for gsm8k and MATH; for other data name a function, --reward verl:FILE.py, or a built-in"
        )
    manager = "reward_model.reward_manager"
    if manager in options:
        yield Left(manager, "rewards are functions of whole batches: none is needed")


def answer_engine(options: Options) -> Iterator[Outcome]:
    """Engine, evaluation and machines."""
    name, memory = f"{ROLLOUT}.name", f"{ROLLOUT}.gpu_memory_utilization"
    engine = options.text(name)
    is_truncated = options.number(f"{ROLLOUT}.top_p") < 1 or options.count(f"{ROLLOUT}.top_k") > 0
    if engine in ("vllm", "sglang"):
        if engine == "sglang" and is_truncated:
            note = "sglang does not tell which tokens top_p and top_k left, and the learner needs them"
            yield Line("sampler.engine", "vllm", (name,), note)
        else:
            yield Line("sampler.engine", engine, (name,))
        if memory in options:
            yield Line("sampler.gpu_memory", float(options.number(memory)), (memory,))
        if options.flag(f"{ROLLOUT}.free_cache_engine"):
            yield Line("sampler.colocate", True, (f"{ROLLOUT}.free_cache_engine",))
    elif name in options:
        yield Left(
            name,
            f"{engine} is not an engine here (vllm, sglang, llama_cpp): completions are sampled in the run's process",
        )
    tokens = options.first(f"{ROLLOUT}.response_length", "data.max_response_length")
    yield Line("sampling.max_tokens", options.count(tokens), (tokens,))
    if (top_k := options.count(f"{ROLLOUT}.top_k")) > 0:
        yield Line("sampling.top_k", top_k, (f"{ROLLOUT}.top_k",))
    elif f"{ROLLOUT}.top_k" in options:
        yield Left(f"{ROLLOUT}.top_k", "all tokens, as here")
    nodes, gpus = "trainer.nnodes", "trainer.n_gpus_per_node"
    if nodes in options and options.count(nodes) > 1:
        yield Need(f"{options.count(nodes)} machines: start the run with torchrun on each (docs/scaling.md)", (nodes,))
    yield Line("learner.world_size", options.count(gpus), (gpus, nodes) if nodes in options else (gpus,))


def answer_evaluation(options: Options) -> Iterator[Outcome]:
    """Evaluations and checkpoints."""
    own = f"{ROLLOUT}.val_kwargs"
    samples, sampled = options.count(f"{own}.n"), options.flag(f"{own}.do_sample")
    temperature = float(options.number(f"{own}.temperature")) if sampled else 0.0
    yield Line("evaluation.samples_per_prompt", samples if temperature else 1, (f"{own}.n",))
    sources = (f"{own}.temperature", f"{own}.do_sample") if sampled else (f"{own}.do_sample",)
    yield Line("evaluation.temperature", temperature, sources, "" if sampled else "greedy")
    if f"{own}.top_p" in options:
        yield Line("evaluation.top_p", float(options.number(f"{own}.top_p")), (f"{own}.top_p",))
    if f"{own}.top_k" in options:
        yield Line("evaluation.top_k", max(0, options.count(f"{own}.top_k")), (f"{own}.top_k",))
    every, save = "trainer.test_freq", "trainer.save_freq"
    yield Line(
        "evaluation.every",
        max(0, options.count(every)),
        (every,),
        "" if options.count(every) > 0 else "before and after only",
    )
    if options.count(save) > 0:
        yield Line("checkpoint.every", options.count(save), (save,))
    elif save in options:
        yield Left(save, "a checkpoint is written in any case, at the end and every checkpoint.every steps")
    if "trainer.val_before_train" in options:
        yield Left(
            "trainer.val_before_train", "evaluated before and after training; evaluation.problems = 0 for neither"
        )


def answer_tracking(options: Options) -> Iterator[Outcome]:
    """Trackers."""
    services = [
        name
        for name in map(str, as_list(options.get("trainer.logger")))
        if name in ("wandb", "tensorboard", "mlflow", "trackio")
    ]
    yield Line("track", services, ("trainer.logger",))


def answer_adapters(options: Options) -> Iterator[Outcome]:
    """Adapters: one option here."""
    rank = options.first(f"{MODEL}.lora.rank", f"{MODEL}.lora_rank")
    if not (options.get(rank) and options.count(rank) > 0):
        return
    alpha = options.first(f"{MODEL}.lora.alpha", f"{MODEL}.lora_alpha")
    targets = options.first(f"{MODEL}.lora.target_modules", f"{MODEL}.target_modules")
    text, sources = f"rank={options.count(rank)}", [rank]
    if alpha in options:
        text, sources = f"{text},alpha={options.count(alpha)}", [*sources, alpha]
    if targets in options:
        names = "+".join(map(str, as_list(options.get(targets))))
        if "linear_" in names:
            yield Left(targets, "names of Megatron's layers: all-linear here")
        else:
            text, sources = f"{text},targets={names}", [*sources, targets]
    yield Line("learner.lora", text, tuple(sources))


VERL = Library(
    "verl",
    DEFAULTS,
    (
        Rule(
            (
                *("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo", "algorithm.gamma", "algorithm.lam"),
                *(f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode", f"{ACTOR}.clip_ratio*"),
                *(f"{ACTOR}.tau_*", f"{ACTOR}.policy_loss.clip_cov_*"),
            ),
            answer_algorithm,
        ),
        Rule(
            (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_*", f"{ACTOR}.entropy_coeff", f"{ACTOR}.policy_loss.*kl_*"),
            answer_kl,
        ),
        Rule(
            (
                "algorithm.use_kl_in_reward",
                "algorithm.kl_ctrl.*",
                "algorithm.kl_penalty",
                f"{OVERLONG}.[elp]*",
                "reward_model.overlong_buffer.*",
            ),
            answer_shaping,
        ),
        Rule(
            tuple(f"algorithm.filter_groups.{name}" for name in ("enable", "metric", "max_num_gen_batches")),
            answer_filters,
        ),
        Rule(
            (
                *(
                    f"{CORRECTION}.rollout_{name}"
                    for name in ("is", "is_threshold", "is_batch_normalize", "rs", "rs_threshold")
                ),
                *(f"{CORRECTION}.bypass_mode", f"{CORRECTION}.loss_type"),
            ),
            answer_corrections,
        ),
        Rule(
            (
                *("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs", f"{ROLLOUT}.n"),
                *("trainer.total_training_steps", "trainer.total_epochs", f"{OPTIM}.lr_*", f"{OPTIM}.warmup_style"),
                *(f"{OPTIM}.min_lr_ratio", f"{OPTIM}.num_cycles", f"{OPTIM}.total_training_steps"),
            ),
            answer_batches,
        ),
        Rule(
            (f"{OPTIM}.lr", f"{OPTIM}.weight_decay", f"{OPTIM}.betas", f"{OPTIM}.clip_grad", f"{ACTOR}.grad_clip"),
            answer_optimizer,
        ),
        Rule(("critic.*", "trainer.critic_warmup"), answer_critic),
        Rule(
            (
                *("data.train_files", "data.val_files", "custom_reward_function.*", "reward_model.enable"),
                *("reward_model.reward_manager", "reward_model.model.*", "reward_model.rollout.*"),
                *("reward_model.micro_batch_size*", "reward_model.num_workers"),
            ),
            answer_data,
        ),
        Rule(
            (
                *(
                    f"{ROLLOUT}.name",
                    f"{ROLLOUT}.gpu_memory_utilization",
                    f"{ROLLOUT}.free_cache_engine",
                    f"{ROLLOUT}.top_k",
                ),
                *(
                    "trainer.nnodes",
                    "trainer.n_gpus_per_node",
                    "data.max_response_length",
                    f"{ROLLOUT}.response_length",
                ),
            ),
            answer_engine,
        ),
        Rule(
            (f"{ROLLOUT}.val_kwargs.*", "trainer.test_freq", "trainer.save_freq", "trainer.val_before_train"),
            answer_evaluation,
        ),
        Rule(("trainer.logger",), answer_tracking),
        Rule((IMPLIED,), answer_program),
        Rule((f"{MODEL}.lora*", f"{MODEL}.target_modules"), answer_adapters),
    ),
)
