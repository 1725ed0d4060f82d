"""The plots of findings: axes, panels and series names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policygrad.lab.measurement import MeasuredClaim


@dataclass(frozen=True)
class Panel:
    """A pair of axes."""

    y: str  # label of the axis, with its unit
    columns: Mapping[str, str]
    """The series name of each column; a name in several panels is one entry of the legend."""
    log: bool = False
    low: float | None = None  # start of the axis, if not that of the data; lower values are cut off
    high: float | None = None


@dataclass(frozen=True)
class ClaimPlot:
    """The plot of a measured claim."""

    x: str
    panels: tuple[Panel, ...]
    log: bool = False

    def to_data(self, measured: MeasuredClaim) -> dict[str, Any]:
        """Return the data to plot, x ascending; missing columns are left out."""
        first, *_ = measured.curves
        order = sorted(range(len(measured.curves[first])), key=measured.curves[first].__getitem__)
        curves = {key: [values[i] for i in order] for key, values in measured.curves.items()}
        present = [{key: name for key, name in panel.columns.items() if key in curves} for panel in self.panels]
        names = list(dict.fromkeys(name for columns in present for name in columns.values()))
        return {
            "x": {"label": self.x, "values": curves[first], "log": self.log},
            "series": names,
            "panels": [
                {
                    "label": panel.y,
                    "log": panel.log,
                    "low": panel.low,
                    "high": panel.high,
                    "lines": [{"series": names.index(name), "values": curves[key]} for key, name in columns.items()],
                }
                for panel, columns in zip(self.panels, present, strict=True)
            ],
        }


def choose_plot(measured: MeasuredClaim) -> ClaimPlot | None:
    """Return the plot in `PLOTS`, or one of all columns over the first; None without curves."""
    if not measured.curves:
        return None
    if measured.name in PLOTS:
        return PLOTS[measured.name]
    if measured.name == "gate_weights":  # small multiples: one gate, both signs
        gates = [key.removesuffix(" up") for key in measured.curves if key.endswith(" up")]
        panels = [Panel(g, {f"{g} up": "Ψ > 0", f"{g} down": "Ψ < 0"}, low=0, high=6) for g in gates]
        return _plot("r", *panels)
    key, *columns = measured.curves
    return ClaimPlot(key, (Panel("", {name: name.replace("_", " ") for name in columns}),))


def _plot(x: str, *panels: Panel, log: bool = False) -> ClaimPlot:
    return ClaimPlot(x, panels, log)


def _panel(y: str, prefix: str, names: Mapping[str, str], *, log: bool = False, low: float | None = 0) -> Panel:
    """Return a panel of the columns PREFIX_KEY."""
    return Panel(y, {f"{prefix}_{key}": name for key, name in names.items()}, log, low)


_RATIOS = {"token": "token", "sequence": "sequence", "product": "product"}
_CLIPS = {"0.2": "clip 0.2 / 0.2", "0.28": "clip 0.2 / 0.28", "none": "no upper bound"}
_GATE_NAMES = {"cap": "cap 5 (CISPO)", "soft": "soft gate (SAPO)", "clip": "clip 0.2 (PPO)"}
_CRITICS = {
    "0": "exact critic",
    "0.1": "errs by 0.1",
    "0.3": "errs by 0.3",
    "2-step": "two steps, errs by 0.3",
    "3-step": "three steps, errs by 0.3",
}
_LEVELS = {"turn": "over turns", "token": "over tokens", "both": "both levels"}
_LENGTHS = {"sequence": "sequence mean", "fixed": "fixed length"}
_KL_PLACES = {"none": "no KL", "k1": "k1 in the loss", "k2": "k2 in the loss", "reward": "k1 in the reward"}
_HACKING = {"free": "no KL", "kl": "KL in the reward"}
_NATS = "KL(π_old‖π), nats per completion"
_BIAS, _VARIANCE = "bias / ‖∇J‖", "variance / ‖∇J‖²"

_REJECTED = {
    "none": "no correction",
    "capped": "ρ up to 2",
    "geometric": "geometric mask",
    "product": "product mask",
    "k2": "k2 mask",
    "k3": "k3 mask",
}
_TEACHERS = {"taught": "taught by the reward", "other": "in a random direction"}
_BEYOND = {
    "importance": "r alone",
    "kept": "CE-GPPO",
    "clip": "clip",
    "divergence": "DPPO",
    "capped": "DPPO, r ≤ 1.2",
    "flipped": "ASPO",
}
PLOTS: dict[str, ClaimPlot] = {
    "group_mean": _plot(
        "group size G", Panel("scale of E g", {"leave_one_out": "leave-one-out", "scale": "group mean"}, low=0)
    ),
    "z_score": _plot(
        "p, how often the prompt is solved",
        Panel(
            "weight of the prompt",
            {"G32": "÷ std, G = 32", "G8": "÷ std, G = 8", "G4": "÷ std, G = 4", "group_mean_G8": "group mean, G = 8"},
            low=0,
        ),
    ),
    "optimal_baseline": _plot("baseline b", Panel(_VARIANCE, {"variance": "constant baseline"}, low=0)),
    "group_size": _plot(
        "group size G",
        Panel("standard deviation / ‖∇J‖", {"deviation": "÷ G", "deviation_power_half": "÷ √G"}, log=True),
        Panel("scale of E g", {"scale_power_half": "÷ √G"}, log=True),
        log=True,
    ),
    "more_statistics": _plot("N completions in the mean", Panel(_VARIANCE, {"variance": "G = 2"}, low=0)),
    "sequence_mean": _plot(
        "length of a right answer (tokens)",
        Panel(
            "weight of a token, sequence sum = 1",
            {
                "sum_right": "sequence sum",
                "sequence_right": "sequence mean",
                "token_right": "token mean",
                "fixed_right": "fixed length",
                "sequence_wrong": "sequence mean, wrong answers",
                "token_wrong": "token mean, wrong answers",
            },
            low=0,
        ),
    ),
    "brevity": _plot(
        "γ",
        Panel("change of right answers' length, tokens per unit of J", {"length_change": "Ψ = γ^k·R, k tokens to go"}),
        Panel("cosine of E g with ∇J", {"cosine": "Ψ = γ^k·R, k tokens to go"}),
    ),
    "product_ratio": _plot(_NATS, _panel(_BIAS, "bias", _RATIOS), _panel(_VARIANCE, "variance", _RATIOS), log=True),
    "rejection": _plot(
        "KL(π‖μ), nats per completion",
        _panel(_BIAS, "bias", _REJECTED),
        _panel(_VARIANCE, "variance", _REJECTED),
        log=True,
    ),
    "beyond_the_clip": _plot(_NATS, _panel("cosine of E g and ∇J", "cosine", _BEYOND, low=0.7), log=True),
    "likeliest_tokens": _plot(
        "likeliest tokens k",
        *(
            Panel(
                f"cosine, {label}", {f"{kind} one": "others as one", f"{kind} none": "others left out"}, low=0, high=1
            )
            for kind, label in (("reverse", "reverse KL"), ("js", "Jensen–Shannon"), ("forward", "forward KL"))
        ),
    ),
    "filtered_answers": _plot(
        "noise on the reward",
        _panel(
            "signal-to-noise ratio",
            "snr",
            {"random": "2 of 5 at random", "best": "best, another", "extremes": "best, worst"},
        ),
    ),
    "marginal_max": _plot(
        "group size G",
        Panel(
            "cosine with ∇E[max R]",
            {"cosine_own": "less the best other", "cosine_divided": "÷ std", "cosine_leave-one-out": "leave-one-out"},
        ),
        Panel(
            "variance / ‖∇E[max R]‖²", {"variance_own": "less the best other", "variance_bare": "the maximum"}, log=True
        ),
    ),
    "teacher_bonus": _plot(
        "coefficient c",
        _panel("signal-to-noise ratio along ∇J", "along", _TEACHERS),
        _panel("cosine with ∇J", "cosine", _TEACHERS),
    ),
    "ratio_over_length": _plot(
        "longest answer (tokens)",
        _panel("standard deviation of w", "spread", _RATIOS),
        _panel(_VARIANCE, "variance", _RATIOS),
        _panel(_BIAS, "bias", _RATIOS),
    ),
    "long_chains": _plot(
        "tokens",
        _panel("standard deviation of w", "spread", _RATIOS),
        _panel(_VARIANCE, "variance", _RATIOS, log=True, low=None),
        _panel(_BIAS, "bias", _RATIOS),
        log=True,
    ),
    "gates": _plot(
        _NATS,
        _panel("share of w kept where the clip drops it", "kept", _GATE_NAMES),
        _panel("cosine with ∇J", "cosine", _GATE_NAMES, low=None),
        log=True,
    ),
    "gae_curve": _plot(
        "λ",
        _panel(_BIAS, "bias", _CRITICS),
        _panel(_VARIANCE, "variance", _CRITICS),
        _panel("mean squared error / ‖∇J‖²", "mse", _CRITICS),
    ),
    "turn_credit": _plot("λ", _panel(_BIAS, "bias", _LEVELS), _panel(_VARIANCE, "variance", _LEVELS)),
    "trust_region_bound": _plot(
        "standard deviation of the move in the logits",
        Panel("J − bound, median", {"slack_kl": "in the KL", "slack_tv": "in total variation"}, log=True),
        log=True,
    ),
    "bound_over_step": _plot(
        "step along the natural gradient",
        Panel(
            "change of J",
            {"J": "J", "surrogate": "surrogate L", "bound_tv": "bound, total variation", "bound_kl": "bound, KL"},
            low=-0.3,
        ),
    ),
    "entropy_collapse": _plot(
        "rollout", _panel("entropy of a token that does not matter (nats)", "idle", _CLIPS), _panel("J", "J", _CLIPS)
    ),
    "length_drift": _plot(
        "J reached",
        _panel("wrong answers (tokens)", "wrong", _LENGTHS, low=None),
        _panel("right answers (tokens)", "right", _LENGTHS, low=None),
    ),
    "k1_in_loss": _plot("rollout", _panel("KL(π‖π_ref), nats per completion", "kl", _KL_PLACES)),
    "reward_hacking": _plot(
        "rollout", _panel("true reward", "true", _HACKING), _panel("proxy, trained on", "proxy", _HACKING)
    ),
}
