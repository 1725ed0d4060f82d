"""Render HTML pages: a template that extends `frame.html`, with style, scripts and data in one file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

WEB = files("policygrad.pages") / "web"
BANDS = WEB / "bands.js"  # script for pages with bands around curves


def render_page(
    body: Traversable,
    data: Any,
    *,
    styles: tuple[Traversable, ...] = (),
    scripts: tuple[Traversable, ...] = (),
    filters: dict[str, Callable[..., Any]] | None = None,
    **values: Any,
) -> str:
    """Render a page.

    Args:
        body: A template that extends `frame.html`, rendered with `values`.
        data: The data that the scripts draw, read by `plots.js`.
        styles, scripts: Files besides `page.css`, `plots.js` and `downloads.js`.
    """
    from jinja2 import DictLoader, Environment  # imported only for pages

    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=DictLoader({"frame.html": _text(WEB / "frame.html")}),
    )
    environment.filters |= {"typeset": render_math, "formula": render_formula} | (filters or {})
    page = environment.from_string(_text(body)).render(
        style="".join(map(_text, (WEB / "page.css", *styles))),
        script="\n".join(map(_text, (WEB / "plots.js", WEB / "downloads.js", *scripts))),
        data=embed_json(data),
        **values,
    )
    return page.encode(
        errors="backslashreplace"
    ).decode()  # lone surrogates, which models may write and UTF-8 cannot encode


def _text(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")


def render_math(text: str) -> Any:
    """Return markup with π_ref and G^-0.5 as subscript and superscript."""
    from markupsafe import Markup, escape

    lowered = re.sub(r"(?<=[πA-Za-z])_(ref|old|π)\b", r"<sub>\1</sub>", str(escape(text)))
    return Markup(re.sub(r"\^([-−]?[\d.]*\d)", r"<sup>\1</sup>", lowered))


def render_formula(text: str) -> Any:
    """Return markup of a formula: all that follows a _ as a subscript, R_i, mean_{j≠i} and π_θ, and powers as superscripts."""
    from markupsafe import Markup

    lowered = re.sub(
        r"_(?:\{([^{}<>]*)\}|(\w+))", lambda found: f"<sub>{found[1] or found[2]}</sub>", str(render_math(text))
    )
    return Markup(lowered)


def embed_json(data: Any) -> str:
    """Return JSON for a script element, which cannot contain `</script>`."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
