"""Builds the documentation's site and checks it: python scripts/make_site.py [FOLDER]

Without FOLDER it is build/site. A warning of Sphinx's is an error; every link within the site, anchors included, has to lead
somewhere; and no page asks anything of the network. Needs the extra `docs`: pip install -e '.[docs]'
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r'<(\w+)\b[^>]*?\s(?:href|src)="([^"]*)"')
_ID = re.compile(r'\sid="([^"]*)"')
_OUTSIDE = re.compile(r"(?:[a-z]+:)?//|(?:mailto|data|javascript):")
_LOADS = ("script", "link", "img", "iframe", "source")
"""Elements whose address is asked for when the page is shown."""


def build(folder: Path) -> int:
    """Sphinx's exit code; 0 = no error and no warning."""
    from sphinx.cmd.build import build_main

    options = ["-W", "--keep-going", "-q", "-j", "auto", "-d", str(folder.parent / f"{folder.name}.doctrees")]
    return build_main([*options, str(ROOT / "docs"), str(folder)])


def broken(folder: Path) -> list[str]:
    """`page: address` of every link that leads nowhere, and of everything that is loaded from elsewhere."""
    folder = folder.resolve()
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.html"))}
    of_sphinx = {path: text for path, text in pages.items() if not path.is_relative_to(folder / "results")}
    anchors = {path: set(map(unescape, _ID.findall(text))) for path, text in of_sphinx.items()}
    result = ((path, address) for path, text in of_sphinx.items() for address in _wrong(path, text, folder, anchors))
    return [f"{path.relative_to(folder)}: {address}" for path, address in result]


def _wrong(page: Path, text: str, folder: Path, anchors: dict[Path, set[str]]) -> Iterator[str]:
    for tag, written in dict.fromkeys(_LINK.findall(text)):
        address = unescape(written)
        if _OUTSIDE.match(address):
            if tag in _LOADS and not address.startswith("data:"):
                yield address
            continue
        name, _, anchor = address.partition("#")
        target = (page.parent / unquote(name.partition("?")[0])).resolve() if name else page
        there = target.exists() and target.is_relative_to(folder)
        if not there or (anchor and unquote(anchor) not in anchors.get(target, {unquote(anchor)})):
            yield address


def main() -> None:
    """Builds and checks; the exit code is not 0 where something is wrong."""
    folder = (Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build" / "site").resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        code = build(folder)
    except ImportError as error:
        sys.exit(f"the site needs the extra docs, pip install -e '.[docs]': {error}")
    wrong = broken(folder)
    for line in wrong:
        print(f"leads nowhere, or out of the site: {line}", file=sys.stderr)
    print(folder / "index.html")
    print(f"search shows excerpts where pages are served: python -m http.server -d {folder}", file=sys.stderr)
    sys.exit(code or bool(wrong))


if __name__ == "__main__":
    main()
