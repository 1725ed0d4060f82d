"""verl's rollout correction: weights and rejections for the difference between engine and learner, and its presets by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policygrad.commands.converters.base import Left, Line, Options, Outcome, Setting, parse_value
from policygrad.errors import ConfigError
from policygrad.utils.argv import split_outside_brackets

CORRECTION = "algorithm.rollout_correction"
IS, IS_THRESHOLD, NORMALIZE = (f"{CORRECTION}.rollout_is{end}" for end in ("", "_threshold", "_batch_normalize"))
RS, RS_THRESHOLD = (f"{CORRECTION}.rollout_rs{end}" for end in ("", "_threshold"))
BYPASS, LOSS = f"{CORRECTION}.bypass_mode", f"{CORRECTION}.loss_type"

_LEVELS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "any"}
_MEASURES = {"k1": "ratio", "k2": "k2", "k3": "k3"}

_WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "": {"rollout_is": None},
    "token": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "seq": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
}
_REJECTIONS: Mapping[str, Mapping[str, Any]] = {
    "": {"rollout_rs": None},
    "seq": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "geo": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
    "k3": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
}
_PRESETS = {  # name -> mode, weights, rejection
    "decoupled_token_is": ("decoupled", "token", ""),
    "decoupled_seq_is": ("decoupled", "seq", ""),
    "decoupled_seq_is_rs": ("decoupled", "seq", "seq"),
    "decoupled_geo_rs": ("decoupled", "", "geo"),
    "decoupled_geo_rs_seq_tis": ("decoupled", "seq", "geo"),
    "decoupled_geo_rs_token_tis": ("decoupled", "token", "geo"),
    "decoupled_k3_rs": ("decoupled", "", "k3"),
    "decoupled_k3_rs_seq_tis": ("decoupled", "seq", "k3"),
    "decoupled_k3_rs_token_tis": ("decoupled", "token", "k3"),
    "bypass_ppo_clip": ("ppo_clip", "", ""),
    "bypass_ppo_clip_geo_rs": ("ppo_clip", "", "geo"),
    "bypass_ppo_clip_k3_rs": ("ppo_clip", "", "k3"),
    "bypass_pg_is": ("reinforce", "seq", ""),
    "bypass_pg_geo_rs": ("reinforce", "", "geo"),
    "bypass_pg_geo_rs_seq_tis": ("reinforce", "seq", "geo"),
    "bypass_pg_geo_rs_token_tis": ("reinforce", "token", "geo"),
    "disabled": ("decoupled", "", ""),
}
"""The presets of verl's page (docs/algo/rollout_corr.md, trainer/config/algorithm.py)."""
_ARGUMENTS = {
    "threshold": "rollout_is_threshold",
    "is_threshold": "rollout_is_threshold",
    "rs_threshold": "rollout_rs_threshold",
}


def expand_presets(settings: Sequence[Setting]) -> list[Setting]:
    """Replace `algorithm.rollout_correction=PRESET` by the options that the preset sets.

    PRESET is a name of verl's page, such as decoupled_geo_rs, also as it is called from Python,
    `RolloutCorrectionConfig.decoupled_geo_rs(rs_threshold="0.99_1.01")`. Raises ConfigError for another name or argument.
    """
    expanded: list[Setting] = []
    for setting in settings:
        if setting.name == CORRECTION and isinstance(setting.value, str):
            values = _read_preset(setting)
            expanded += [setting._replace(name=f"{CORRECTION}.{key}", value=value) for key, value in values.items()]
        else:
            expanded.append(setting)
    return expanded


def _read_preset(setting: Setting) -> dict[str, Any]:
    found = re.fullmatch(r"(?:RolloutCorrectionConfig\.)?(\w+)(?:\((.*)\))?", setting.value.strip(), re.DOTALL)
    if found is None or found[1] not in _PRESETS:
        raise ConfigError(f"{setting.place}: {setting.value} is no preset of verl's: {', '.join(_PRESETS)}")
    mode, weights, rejection = _PRESETS[found[1]]
    bypass = {"bypass_mode": True, "loss_type": mode} if mode != "decoupled" else {"bypass_mode": False}
    values = {**_WEIGHTS[weights], **_REJECTIONS[rejection], **bypass}
    for argument in filter(None, split_outside_brackets(found[2] or "")):
        name, equals, value = argument.partition("=")
        key = _ARGUMENTS.get(name.strip())
        if not equals or key not in values:
            raise ConfigError(
                f"{setting.place}: {argument.strip()} is no argument of {found[1]}; name it, as in rs_threshold=0.99_1.01"
            )
        values[key] = parse_value(value)
    return {key: value for key, value in values.items() if value is not None} or {"bypass_mode": False}


def answer_corrections(options: Options) -> Iterator[Outcome]:
    """Weights and rejections."""
    level, is_bypass = options.text(IS), options.flag(BYPASS)
    rejections = list(_read_rejections(options))
    if is_bypass:  # π_old is the sampler's policy, which leaves nothing to weigh beside the ratio
        yield Line("algorithm.old_policy", "sampler", (BYPASS,))
        if options.flag(NORMALIZE):
            yield Left(NORMALIZE, "the weights are the ratio itself with bypass_mode, and are not normalised")
    elif level in ("token", "sequence"):
        yield Line("algorithm.corrections.TruncatedIS", None, (IS,))
        yield options.number_line("algorithm.corrections.TruncatedIS.cap", IS_THRESHOLD)
        yield Line("algorithm.corrections.TruncatedIS.level", level, (IS,))
        if options.flag(NORMALIZE):
            note = "over an update; there over a rollout"
            yield Line("algorithm.corrections.TruncatedIS.normalise", True, (NORMALIZE,), note)
    for number, (name, low, high) in enumerate(rejections, 1):
        kind, _, estimator = name.rpartition("_")
        part = f"algorithm.corrections.MismatchMask{f'#{number}' if number > 1 else ''}"
        yield Line(part, None, (RS,))
        yield Line(f"{part}.measure", _MEASURES[estimator], (RS,))
        yield Line(f"{part}.level", _LEVELS[kind], (RS,))
        note = "of π/μ; verl's k1 bounds μ/π" if estimator == "k1" else ""
        yield Line(f"{part}.high", high, (RS_THRESHOLD,), note)
        if low is not None:
            yield Line(f"{part}.low", low, (RS_THRESHOLD,))
        if is_bypass:
            yield Line(f"{part}.of", "current", (BYPASS,))
        else:
            yield Line(f"{part}.denominators", "kept", (RS,), "rejected tokens leave verl's averages")
    if not rejections and (is_bypass or level not in ("token", "sequence")):
        yield Line("algorithm.corrections", [], (BYPASS,) if is_bypass else ())


def _read_rejections(options: Options) -> Iterator[tuple[str, float | None, float]]:
    """Yield (name, low, high) of each rejection; of k1 the bounds are those of the ratio π/μ. Raises ConfigError."""
    if not (names := _split(options, RS)):
        return
    bounds = _split(options, RS_THRESHOLD)
    if len(bounds) not in (1, len(names)):
        raise ConfigError(
            f"{RS_THRESHOLD} has {len(bounds)} bounds for {len(names)} rejections: one for all, or one for each"
        )
    for name, bound in zip(names, bounds * (len(names) // len(bounds)), strict=True):
        kind, _, estimator = name.rpartition("_")
        low, sep, high = bound.partition("_")
        numbers = re.fullmatch(r"[\d.]+(e-?\d+)?", low) and (not sep or re.fullmatch(r"[\d.]+(e-?\d+)?", high))
        if kind not in _LEVELS or estimator not in _MEASURES or (kind, estimator) == ("seq_max", "k1") or not numbers:
            raise ConfigError(f"{RS}={name} with {RS_THRESHOLD}={bound} is none of verl's rejections")
        if estimator != "k1":
            yield name, None, float(bound)
        elif sep:
            yield name, _round(1 / float(high)), _round(1 / float(low))
        else:
            yield name, _round(1 / float(low)), float(low)


def _split(options: Options, name: str) -> list[str]:
    return [part.strip() for part in options.text(name).split(",") if part.strip() not in ("", "null", "None")]


def _round(x: float) -> float:
    return float(f"{x:.12g}")
