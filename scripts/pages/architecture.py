"""What docs/architecture.md shows of the code itself: the rooms with their files, and the layers they stand in."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Sequence
from pathlib import Path

from pages.markdown import block, table

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "policygrad"


def said(path: Path) -> str:
    """The first paragraph of a module's docstring, for a room of its `__init__.py`.

    Raises:
        SystemExit: it has none, and so could not be shown.
    """
    module = path / "__init__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(f"{module.relative_to(ROOT)} has no docstring: docs/architecture.md shows its first paragraph")
    return " ".join(text.split("\n\n")[0].split()).replace("<", "&lt;")


def layers() -> list[list[str]]:
    """Of import-linter's contract, the uppermost first; several names in one layer do not import each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (found,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip().removeprefix("policygrad.") for name in layer.split("|")] for layer in found]


def layers_block() -> str:
    """A line per layer."""
    return block("\n".join(" · ".join(names) for names in layers()))


def tree(prefix: str) -> str:
    """Every room, the uppermost layer first, and then its files; links start with `prefix`."""
    files = [PACKAGE / name for names in layers() for name in names]
    rooms = [path for path in files if path.is_dir()]
    left_out = _rooms(PACKAGE) - set(rooms)
    if left_out:
        raise SystemExit(
            f"no layer of pyproject.toml's contract has {', '.join(sorted(path.name for path in left_out))}"
        )
    single = sorted(path for path in PACKAGE.glob("*.py"))
    return "\n\n".join(
        ["**policygrad/** · " + said(PACKAGE), _files(single, prefix), *(_room(r, prefix) for r in rooms)]
    )


def _rooms(folder: Path) -> set[Path]:
    return {path.parent for path in folder.glob("*/__init__.py")}


def _room(room: Path, prefix: str) -> str:
    """Folded: its docstring shows, its files on a click, those of the rooms in it after its own."""
    name = room.relative_to(PACKAGE).as_posix()
    inner = sorted(path.parent for path in room.glob("*/**/__init__.py"))
    parts = [_files(sorted(room.glob("*.py")), prefix)]
    for path in inner:
        parts += [
            f"**{path.relative_to(PACKAGE).as_posix()}/** · {said(path)}",
            _files(sorted(path.glob("*.py")), prefix),
        ]
    head = f"<details>\n<summary><b>{name}/</b> · {said(room)}</summary>"
    return "\n\n".join([head, *filter(None, parts), "</details>"])


def _files(paths: Sequence[Path], prefix: str) -> str:
    rows = [
        (f"[`{path.name}`]({prefix}{path.relative_to(ROOT).as_posix()})", said(path))
        for path in paths
        if path.name != "__init__.py"
    ]
    return table(("file", "what it is"), rows) if rows else ""
