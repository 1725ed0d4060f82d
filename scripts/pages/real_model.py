"""What docs/real-model.md shows of scripts/train_smollm2.py: figures, answers, and the picture of the run."""

from __future__ import annotations

from typing import Any

from pages.curves import DARK, STYLE
from pages.markdown import block, table
from pages.reports import load

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 260, 50, 620, 20, 220


def seen_block(found: dict[str, Any] | None = None) -> str:
    """The block. found: other results than the committed ones."""
    found = load("smollm2") if found is None else found
    if found is None:
        return "Not run yet: `python scripts/train_smollm2.py` runs it, and `make docs` writes what came of it."
    (_, before, error_before), (_, after, error_after) = found["eval/reward"][0], found["eval/reward"][-1]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    seconds = found["processor_seconds"]
    took = f", {seconds / 60:.0f} minutes of processor time" if seconds else ""
    weights = f" Its weights: {found['weights']}." if found["weights"] else ""
    intro = (
        f"`{found['made_by']}`, one seed ({versions}; {found['machine']}{took}).{weights} Held-out accuracy on 128 "
        f"of the {found['problems']['eval/reward']} questions that are not trained on, 4 samples each at temperature 1: "
        f"**{before:.3f} ± {error_before:.3f} before, {after:.3f} ± {error_after:.3f} after** {found['steps']} steps "
        f"(standard errors over problems)."
    )
    rows = [
        (str(a["step"]), a["prompt"], f"`{a['completion'].strip()!r}`", f"{a['reward']:g}") for a in found["answers"]
    ]
    said = table(("step", "question", "answer", "reward"), rows)
    picture = "![Mean reward of each step](real-model.svg)"
    return "\n\n".join(
        (intro, picture, said, "The run, in the folder with the problems:", block(found["command"], "sh"))
    )


def picture(found: dict[str, Any] | None = None) -> str:
    """The SVG: each step's mean reward as a dot, their line, and the held-out score before and after with its standard error."""
    found = load("smollm2") if found is None else found
    if found is None:
        return _svg(['<text x="20" y="35">Not run yet.</text>'])
    end = max(step for step, _ in found["curve"])

    def at(step: float, value: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * step / end, BOTTOM - (BOTTOM - TOP) * value

    shapes = []
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = at(0, level)
        shapes.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        shapes.append(f'<text class="small" x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{level:g}</text>')
    points = " ".join("{:.1f},{:.1f}".format(*at(step, reward)) for step, reward in found["curve"])
    shapes.append(f'<polyline class="curve" points="{points}"/>')
    for step, score, error in found["eval/reward"]:
        x, low = at(step, score - error)
        _, high = at(step, score + error)
        shapes.append(f'<path class="held" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
        shapes.append(f'<circle class="held" cx="{x:.1f}" cy="{(low + high) / 2:.1f}" r="4"/>')
    words = "line: mean reward of the 128 answers of a step; circles: held-out accuracy, ± a standard error"
    shapes.append(f'<text class="small" x="{LEFT}" y="{BOTTOM + 18}">step 0</text>')
    shapes.append(f'<text class="small" x="{RIGHT}" y="{BOTTOM + 18}" text-anchor="end">{end}</text>')
    shapes.append(f'<text class="small" x="{LEFT}" y="{HEIGHT - 6}">{words}</text>')
    return _svg(shapes)


def _svg(shapes: list[str]) -> str:
    held = ".held { fill: #1a7f37; stroke: #1a7f37; stroke-width: 1.5 }"
    style = f"<style>{STYLE}\n  {held}\n  @media (prefers-color-scheme: dark) {{{DARK}\n  }}\n</style>"
    page = f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
    return "\n".join([head, "<title>SmolLM2-135M-Instruct learns sums</title>", style, page, *shapes, "</svg>"]) + "\n"
