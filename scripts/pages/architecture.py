"""What docs/architecture.md shows of the code itself: the rooms, in layers, and the flow of data."""

from __future__ import annotations

import ast
import tomllib
from html import escape
from pathlib import Path

from pages.markdown import table

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "policygrad"


def said(path: Path) -> str:
    """The first paragraph of a module's docstring, for a room of its `__init__.py`."""
    module = path / "__init__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("<", "&lt;")


def layers() -> list[list[str]]:
    """Of import-linter's contract, the uppermost first; several names in one layer do not import each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (result,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip().removeprefix("policygrad.") for name in layer.split("|")] for layer in result]


def rooms_block(prefix: str) -> str:
    """A row per room and per file that is a layer, the uppermost first; links start with `prefix`."""
    rows = []
    for number, names in enumerate(layers(), 1):
        for name in names:
            room = PACKAGE / name
            path = room if room.is_dir() else PACKAGE / f"{name}.py"
            inner = sorted(x.parent for x in room.glob("*/**/__init__.py"))
            rows += [(str(number), _link(x, prefix), said(x)) for x in (path, *inner)]
    left_out = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {n for names in layers() for n in names}
    if left_out:
        raise SystemExit(f"no layer of pyproject.toml's contract has {', '.join(sorted(left_out))}")
    return table(("layer", "room", "what it is"), rows)


def _link(path: Path, prefix: str) -> str:
    name = path.relative_to(PACKAGE).as_posix() + ("/" if path.is_dir() else "")
    return f"[`{name}`]({prefix}{path.relative_to(ROOT).as_posix()})"


WIDTH, HEIGHT = 1080, 604
STYLE = """
  .page { fill: #ffffff } .room { fill: #f6f8fa; stroke: #d0d7de } .box { fill: #ffffff; stroke: #8c959f }
  .given { stroke: #0969da; stroke-width: 2 } .arrow { stroke: #57606a; stroke-width: 1.5; fill: none } .tip { fill: #57606a }
  text { font-family: ui-sans-serif, system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; font-size: 15px }
  .name { font-weight: 600 } .small { font-size: 12px; fill: #57606a } .type { font-size: 13px; fill: #8250df }
  .where { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px; fill: #57606a }"""
DARK = """
  .page { fill: #0d1117 } .room { fill: #161b22; stroke: #30363d } .box { fill: #0d1117; stroke: #6e7681 }
  .given { stroke: #58a6ff } .arrow { stroke: #8b949e } .tip { fill: #8b949e }
  text { fill: #e6edf3 } .small, .where { fill: #9198a1 } .type { fill: #d2a8ff }"""


def _text(x: float, y: float, words: str, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, name: str, room: str, says: str = "", *, given: bool = False) -> str:
    """72 high; its name, the room it stands in, and a few words."""
    kind = "box given" if given else "box"
    lines = (
        [(28, name, "name"), (46, room, "where"), (62, says, "small")]
        if says
        else [(32, name, "name"), (52, room, "where")]
    )
    shape = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="72" rx="8"/>'
    return "".join([shape, *(_text(x + width / 2, y + dy, words, style) for dy, words, style in lines)])


def _picture_room(x: float, y: float, width: float, height: float, name: str, name_x: float) -> str:
    shape = f'<rect class="room" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="12"/>'
    return shape + _text(name_x, y + 24, name, "where", "start")


def _arrow(x1: float, y1: float, x2: float, y2: float, label: str = "", dx: float = 0, dy: float = -7) -> str:
    """Its label stands in the middle, moved by (dx, dy); beside the arrow where dx is not 0."""
    line = f'<path class="arrow" d="M{x1:g} {y1:g}L{x2:g} {y2:g}" marker-end="url(#tip)"/>'
    anchor = "start" if dx > 0 else "end" if dx < 0 else "middle"
    return line + (_text((x1 + x2) / 2 + dx, (y1 + y2) / 2 + dy, label, "type", anchor) if label else "")


def picture() -> str:
    """The whole SVG."""
    shapes = [
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="12"/>',
        _picture_room(184, 20, 876, 266, "rollout/  Rollouter.collect", 200),
        _box(24, 76, 124, "Task", "tasks/", given=True),
        _arrow(148, 112, 212, 112, "Example", dy=-8),
        _box(214, 76, 190, "Environment", "environments/", "one episode", given=True),
        _arrow(404, 98, 538, 98, "Observation, Step"),
        _arrow(540, 130, 406, 130, "Action", dy=17),
        _box(540, 76, 166, "episodes", "rollout/episodes.py", "turn by turn, together"),
        _arrow(706, 98, 862, 98, "Request"),
        _arrow(864, 130, 708, 130, "Generation", dy=17),
        _box(864, 76, 172, "Sampler", "samplers/", "token ids in and out", given=True),
        _arrow(623, 148, 623, 196, "Trajectory", dx=10, dy=5),
        _box(540, 198, 166, "Reward", "rewards/", "in killable workers", given=True),
        _arrow(540, 234, 406, 234, "Group"),
        _box(214, 198, 190, "batch", "rollout/batching.py", "filters, tensors"),
        _picture_room(24, 324, 1036, 134, "training/loop.py", 448),
        _arrow(309, 270, 309, 366, "Batch", dx=10, dy=-9),
        _box(40, 368, 134, "next step", "Progress", "counters, state"),
        _arrow(86, 368, 86, 150, "position", dx=10),
        _box(214, 368, 190, "evaluate", "learners/", "log π_old, log π_ref, V", given=True),
        _arrow(404, 404, 446, 404),
        _box(448, 368, 150, "advantage Ψ", "core/", "the chain of links", given=True),
        _arrow(598, 404, 640, 404),
        _box(642, 368, 168, "objective", "core/", "Σ c·w·Ψ + c·k", given=True),
        _arrow(810, 404, 862, 404),
        _box(864, 368, 172, "update", "learners/", "an UpdateRule", given=True),
        _arrow(948, 368, 948, 150, "PublishedWeights", dx=-10, dy=50),
        _text(958, 309, "weight_sync/", "where", "start"),
        _arrow(309, 458, 309, 506, "metrics, completions", dx=10, dy=5),
        _box(214, 508, 190, "Tracker", "trackers/", "any number", given=True),
        _arrow(523, 458, 523, 506, "every step", dx=10, dy=5),
        _box(448, 508, 150, "Callback", "training/", "may change the run", given=True),
        _arrow(726, 458, 726, 506, "Progress, state", dx=10, dy=5),
        _box(642, 508, 168, "Checkpointer", "checkpoint/", "atomic, verified"),
        '<rect class="box given" x="866" y="536" width="20" height="14" rx="4"/>',
        _text(894, 548, "can be replaced by yours", "small", "start"),
        _text(866, 568, "violet: types that travel", "type", "start"),
    ]
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="title">',
            '<title id="title">Data flow in policygrad</title>',
            f"<style>{STYLE}\n  @media (prefers-color-scheme: dark) {{{DARK}\n  }}\n</style>",
            f"<defs>{tip}</defs>",
            *shapes,
            "</svg>\n",
        ]
    )
