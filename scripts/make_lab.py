"""Write what the lab measures into the documentation: docs/lab.md and the figures docs/primer/*.svg.

python scripts/make_lab.py [lab] [turns] [primer]

Without a name all three. Numbers without a standard error are exact up to rounding; they are written to three digits.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pages.markdown import fill_blocks
from policygrad.algorithms import ALGORITHMS
from policygrad.core.base import Advantage
from policygrad.core.gae import GAE
from policygrad.core.turns import TurnReturn
from policygrad.lab.estimators import enumerate_steps
from policygrad.lab.findings import critics
from policygrad.lab.findings.advantages import with_advantage
from policygrad.lab.measurement import MeasuredClaim, Measurement, measure_algorithm
from policygrad.lab.plots import choose_plot
from policygrad.lab.report import LabReport, build_lab_report, select_experiments, single_threaded
from policygrad.lab.setting import LabSetting, supported_algorithms
from policygrad.lab.worlds import walk_setting
from policygrad.pages.charts import chart

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("lab", "turns", "primer")
COLUMNS = {
    "scale": "scale",
    "bias": "bias",
    "cosine": "cosine",
    "variance": "variance",
    "mse": "MSE",
    "snr": "SNR",
    "best_mse": "best",
}
GROUP_SIZES = (2, 8)  # the table has groups of 4
TURN_GROUP_SIZE = 3  # episodes
PRIMER_FIGURES = (
    "optimal_baseline",
    "gae_curve",
    "product_ratio",
    "bound_over_step",
    "gates",
    "entropy_collapse",
    "k1_in_loss",
    "reward_hacking",
    "z_score",
    "length_drift",
)
"""Experiments, in the order of docs/primer.md."""


def write_lab_page() -> None:
    """Fill docs/lab.md: every algorithm's gradient, by group size, and every finding."""
    report = build_lab_report(supported_algorithms(ALGORITHMS, 4))
    smallest = supported_algorithms(ALGORITHMS, GROUP_SIZES[0])
    by_size = [build_lab_report(smallest, size, names=()) for size in GROUP_SIZES]
    on_policy, off_policy = ([pair[side] for pair in report.rows] for side in (0, 1))
    away = f"Off-policy, {report.kl:g} nats a completion away:"
    page = DOCS / "lab.md"
    text = fill_blocks(
        page,
        table=f"Groups of {report.group_size}; {report.world}.\n\nOn-policy:\n\n{measurement_table(on_policy)}\n\n"
        f"{away}\n\n{measurement_table(off_policy)}",
        sizes=f"On-policy:\n\n{size_table(by_size, 0)}\n\n{away}\n\n{size_table(by_size, 1)}",
        findings="\n".join(map(format_claim, report.findings)),
    )
    page.write_text(text, encoding="utf-8")
    print(page)


def write_turns_page() -> None:
    """Fill docs/lab.md: bias and variance of credit along turns."""
    setting = walk_setting()
    with single_threaded():
        chains, with_critics = measure_turn_chains(setting)
    objective = float(setting.world.objective(setting.theta))
    page = DOCS / "lab.md"
    text = fill_blocks(
        page,
        world=f"Groups of {TURN_GROUP_SIZE}; {setting.world.tree.size} episodes of up to three turns; J = {objective:.3f}; "
        f"a critic that errs by {critics.ERROR:g}, where there is one.",
        chains=measurement_table(chains),
        critics=measurement_table(with_critics),
    )
    page.write_text(text, encoding="utf-8")
    print(page)


def measure_turn_chains(setting: LabSetting) -> tuple[list[Measurement], list[Measurement]]:
    """Measure (chains without a critic, chains with an erring one)."""
    erring = replace(setting, critic_error=critics.ERROR)
    steps = enumerate_steps(setting, TURN_GROUP_SIZE)
    plain = critics.UNBIASED | {f"TurnReturn({critics.GAMMA:g})": (TurnReturn(critics.GAMMA),)} | critics.COMPARED
    links: dict[str, Advantage] = {}
    for link in (GAE(), *(make(lam) for make in critics.FAMILIES.values() for lam in (0.0, 0.9, 1.0))):
        settings = {name: getattr(link, name) for name in ("turn_lam", "lam") if hasattr(link, name)}
        links[f"{type(link).__name__}({', '.join(f'{k}={v:g}' for k, v in settings.items())})"] = link
    return (
        [measure_algorithm(with_advantage(*chain, name=name), setting, steps) for name, chain in plain.items()],
        [measure_algorithm(with_advantage(link, name=name), erring, steps) for name, link in links.items()],
    )


def write_primer_figures() -> None:
    """Draw docs/primer/NAME.svg for every experiment that the primer shows."""
    (DOCS / "primer").mkdir(exist_ok=True)
    for name, svg in draw_primer_figures():
        path = DOCS / "primer" / f"{name}.svg"
        path.write_text(svg, encoding="utf-8")
        print(path, flush=True)


def draw_primer_figures() -> Iterator[tuple[str, str]]:
    """Run the experiments and yield (name, SVG)."""
    for measured in (experiment(0) for experiment in select_experiments(PRIMER_FIGURES)):
        plot = choose_plot(measured)
        assert plot is not None, f"{measured.name} has no curves"
        yield measured.name, chart(measured.claim, plot.to_data(measured))


def measurement_table(rows: list[Measurement]) -> str:
    """Write a table with one row per measurement."""
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---|" + "---:|" * len(COLUMNS)]
    for m in rows:
        lines.append(f"| `{m.name}` | {' | '.join(_format(getattr(m.figures, name)) for name in COLUMNS)} |")
    return "\n".join(lines)


def size_table(reports: list[LabReport], side: int) -> str:
    """Write bias and variance by group size, one row per algorithm, ± a standard error where groups were sampled.

    Args:
        side: 0 for on-policy, 1 for off-policy.
    """
    columns = ("bias", "variance")
    heads = [f"{name}, G = {r.group_size}" for name in columns for r in reports]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for rows in zip(*(r.rows for r in reports), strict=True):
        measurements = [row[side] for row in rows]
        cells = [
            _format(getattr(m.figures, name)) + (f" ± {getattr(m.errors, name):.3f}" if m.errors else "")
            for name in columns
            for m in measurements
        ]
        lines.append(f"| `{measurements[0].name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_claim(measured: MeasuredClaim) -> str:
    """Format a measured claim as a list item, with the command that measures it."""
    error = "" if measured.error is None else f" (standard error {measured.error:.2g})"
    claim, sentence = (text.replace("*", "\\*") for text in (measured.claim, measured.sentence))  # b* is no emphasis
    mark = "✓" if measured.holds else "✗"
    return f"- {mark} **{claim}** {sentence}{error}  \n  `policygrad lab --experiment {measured.name}`"


def _format(x: float) -> str:
    return "0" if abs(x) < 1e-9 else f"{x:.3f}"  # below 1e-9 is rounding


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", choices=[*PAGES, []], metavar="lab|turns|primer")
    names = parser.parse_args().pages or PAGES
    for name, write in zip(PAGES, (write_lab_page, write_turns_page, write_primer_figures), strict=True):
        if name in names:
            write()
