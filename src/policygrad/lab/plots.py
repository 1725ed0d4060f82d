"""The plots of findings: axes, panels and series names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policygrad.lab.measurement import Finding


@dataclass(frozen=True)
class Panel:
    """A pair of axes."""

    y: str
    """Label of the axis, with its unit."""
    columns: Mapping[str, str]
    """The series name of each column; a name in several panels is one entry of the legend."""
    log: bool = False
    low: float | None = None
    """Start of the axis, if not that of the data; lower values are cut off."""
    high: float | None = None


@dataclass(frozen=True)
class FindingPlot:
    """The plot of a finding."""

    x: str
    panels: tuple[Panel, ...]
    log: bool = False

    def to_data(self, finding: Finding) -> dict[str, Any]:
        """Return the data to plot, x ascending; missing columns are left out."""
        curves, first = finding.curves, next(iter(finding.curves))
        order = sorted(range(len(curves[first])), key=curves[first].__getitem__)
        names = list(
            dict.fromkeys(name for panel in self.panels for key, name in panel.columns.items() if key in curves)
        )

        def column(key: str) -> list[float]:
            return [curves[key][i] for i in order]

        def lines(panel: Panel) -> list[dict[str, Any]]:
            present = {key: name for key, name in panel.columns.items() if key in curves}
            return [{"series": names.index(name), "values": column(key)} for key, name in present.items()]

        return {
            "x": {"label": self.x, "values": column(first), "log": self.log},
            "series": names,
            "panels": [
                {"label": panel.y, "log": panel.log, "low": panel.low, "high": panel.high, "lines": lines(panel)}
                for panel in self.panels
            ],
        }


def choose_plot(finding: Finding) -> FindingPlot | None:
    """Return the plot in `PLOTS`, or one of all columns over the first; None without curves."""
    if not finding.curves:
        return None
    if finding.name in PLOTS:
        return PLOTS[finding.name]
    if finding.name == "gate_weights":  # small multiples: one gate, both signs
        gates = [key.removesuffix(" up") for key in finding.curves if key.endswith(" up")]
        return FindingPlot(
            "r", tuple(Panel(g, {f"{g} up": "Ψ > 0", f"{g} down": "Ψ < 0"}, low=0, high=6) for g in gates)
        )
    key, *columns = finding.curves
    return FindingPlot(key, (Panel("", {name: name.replace("_", " ") for name in columns}),))


def _prefix_keys(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}{key}": name for key, name in names.items()}


_RATIOS = {"token": "token", "sequence": "sequence", "product": "product"}
_CLIPS = {"0.2": "clip 0.2 / 0.2", "0.28": "clip 0.2 / 0.28", "none": "no upper bound"}
_GATE_NAMES = {"cap": "cap 5 (CISPO)", "soft": "soft gate (SAPO)", "clip": "clip 0.2 (PPO)"}
_CRITICS = {"0": "exact critic", "0.1": "errs by 0.1", "0.3": "errs by 0.3"}
_STEPS = {"2-step": "two steps, errs by 0.3", "3-step": "three steps, errs by 0.3"}
_LEVELS = {"turn": "over turns", "token": "over tokens", "both": "both levels"}
_NATS = "KL(π_old‖π), nats per completion"

PLOTS: dict[str, FindingPlot] = {
    "group_mean": FindingPlot(
        "group size G", (Panel("scale of E g", {"leave_one_out": "leave-one-out", "scale": "group mean"}, low=0),)
    ),
    "z_score": FindingPlot(
        "p, how often the prompt is solved",
        (
            Panel(
                "weight of the prompt",
                {
                    "G32": "÷ std, G = 32",
                    "G8": "÷ std, G = 8",
                    "G4": "÷ std, G = 4",
                    "group_mean_G8": "group mean, G = 8",
                },
                low=0,
            ),
        ),
    ),
    "optimal_baseline": FindingPlot(
        "baseline b", (Panel("variance / ‖∇J‖²", {"variance": "constant baseline"}, low=0),)
    ),
    "group_size": FindingPlot(
        "group size G",
        (
            Panel("standard deviation / ‖∇J‖", {"deviation": "÷ G", "deviation_power_half": "÷ √G"}, log=True),
            Panel("scale of E g", {"scale_power_half": "÷ √G"}, log=True),
        ),
        log=True,
    ),
    "more_statistics": FindingPlot(
        "N completions in the mean", (Panel("variance / ‖∇J‖²", {"variance": "G = 2"}, low=0),)
    ),
    "sequence_mean": FindingPlot(
        "length of a right answer (tokens)",
        (
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
    ),
    "brevity": FindingPlot(
        "γ",
        (
            Panel(
                "change of right answers' length, tokens per unit of J", {"length_change": "Ψ = γ^k·R, k tokens to go"}
            ),
            Panel("cosine of E g with ∇J", {"cosine": "Ψ = γ^k·R, k tokens to go"}),
        ),
    ),
    "product_ratio": FindingPlot(
        _NATS,
        (
            Panel("bias / ‖∇J‖", _prefix_keys("bias_", _RATIOS), low=0),
            Panel("variance / ‖∇J‖²", _prefix_keys("variance_", _RATIOS), low=0),
        ),
        log=True,
    ),
    "ratio_over_length": FindingPlot(
        "longest answer (tokens)",
        (
            Panel("standard deviation of w", _prefix_keys("spread_", _RATIOS), low=0),
            Panel("variance / ‖∇J‖²", _prefix_keys("variance_", _RATIOS), low=0),
            Panel("bias / ‖∇J‖", _prefix_keys("bias_", _RATIOS), low=0),
        ),
    ),
    "long_chains": FindingPlot(
        "tokens",
        (
            Panel("standard deviation of w", _prefix_keys("spread_", _RATIOS), low=0),
            Panel("variance / ‖∇J‖²", _prefix_keys("variance_", _RATIOS), log=True),
            Panel("bias / ‖∇J‖", _prefix_keys("bias_", _RATIOS), low=0),
        ),
        log=True,
    ),
    "gates": FindingPlot(
        _NATS,
        (
            Panel("share of w kept where the clip drops it", _prefix_keys("kept_", _GATE_NAMES), low=0),
            Panel("cosine with ∇J", _prefix_keys("cosine_", _GATE_NAMES)),
        ),
        log=True,
    ),
    "gae_curve": FindingPlot(
        "λ",
        (
            Panel("bias / ‖∇J‖", _prefix_keys("bias_", _CRITICS | _STEPS), low=0),
            Panel("variance / ‖∇J‖²", _prefix_keys("variance_", _CRITICS | _STEPS), low=0),
            Panel("mean squared error / ‖∇J‖²", _prefix_keys("mse_", _CRITICS | _STEPS), low=0),
        ),
    ),
    "turn_credit": FindingPlot(
        "λ",
        (
            Panel("bias / ‖∇J‖", _prefix_keys("bias_", _LEVELS), low=0),
            Panel("variance / ‖∇J‖²", _prefix_keys("variance_", _LEVELS), low=0),
        ),
    ),
    "trust_region_bound": FindingPlot(
        "standard deviation of the move in the logits",
        (Panel("J − bound, median", {"slack_kl": "in the KL", "slack_tv": "in total variation"}, log=True),),
        log=True,
    ),
    "bound_over_step": FindingPlot(
        "step along the natural gradient",
        (
            Panel(
                "change of J",
                {"J": "J", "surrogate": "surrogate L", "bound_tv": "bound, total variation", "bound_kl": "bound, KL"},
                low=-0.3,
            ),
        ),
    ),
    "entropy_collapse": FindingPlot(
        "rollout",
        (
            Panel("entropy of a token that does not matter (nats)", _prefix_keys("idle_", _CLIPS), low=0),
            Panel("J", _prefix_keys("J_", _CLIPS), low=0),
        ),
    ),
    "length_drift": FindingPlot(
        "J reached",
        (
            Panel("wrong answers (tokens)", {"wrong_sequence": "sequence mean", "wrong_fixed": "fixed length"}),
            Panel("right answers (tokens)", {"right_sequence": "sequence mean", "right_fixed": "fixed length"}),
        ),
    ),
    "k1_in_loss": FindingPlot(
        "rollout",
        (
            Panel(
                "KL(π‖π_ref), nats per completion",
                {
                    "kl_none": "no KL",
                    "kl_k1": "k1 in the loss",
                    "kl_k2": "k2 in the loss",
                    "kl_reward": "k1 in the reward",
                },
                low=0,
            ),
        ),
    ),
    "reward_hacking": FindingPlot(
        "rollout",
        (
            Panel("true reward", {"true_free": "no KL", "true_kl": "KL in the reward"}, low=0),
            Panel("proxy, trained on", {"proxy_free": "no KL", "proxy_kl": "KL in the reward"}, low=0),
        ),
    ),
}
