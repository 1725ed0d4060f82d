"""YAML of configurations, read as a TOML file of the same keys would be.

PyYAML comes with transformers. Its own reader follows YAML 1.1, in which 1e-6 is text, `off` is false and 010 is 8; this one knows
the numbers, booleans and nulls of YAML 1.2, and no tags, dates, anchors or repeated keys.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from policygrad.utils.filesystem import check_depth, read_text_bounded

_NUMBERS = {
    "int": re.compile(r"[-+]?[0-9][0-9_]*"),
    "float": re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?"),
}


def read_yaml(path: Path) -> dict[str, Any]:
    """Parse a YAML file. Raises OSError and UnicodeDecodeError as `read_text_bounded`; ValueError if it is not YAML or has what a
    configuration cannot hold; UnusableDataError if it is nested too deeply; ImportError without PyYAML."""
    import yaml

    text = read_text_bounded(path)
    try:
        data = yaml.load(text, _build_loader())
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        raise ValueError(f"{problem} (line {mark.line + 1})" if mark is not None else problem) from error
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise ValueError("it holds no keys at its top: write `steps: 100`, a key and its value in each line")
    check_depth(data)
    return data


@cache
def _build_loader() -> Any:
    """Return a loader of YAML 1.2's plain values. It is made where it is needed: PyYAML is imported for a YAML file alone."""
    import yaml
    from yaml.nodes import ScalarNode

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  # as the class above declares it

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()
            if getattr(event, "anchor", None) is not None:
                raise yaml.composer.ComposerError(
                    None, None, "anchors and aliases are not read: write the value out", event.start_mark
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set[str]()
            for key, _ in node.value:
                name = key.value if isinstance(key, ScalarNode) else ""
                if not isinstance(key, ScalarNode) or key.tag != _tag("str"):
                    problem = f"the key {name!r} is not text: put it between quotes"
                elif name in seen:
                    problem = f"the key {name!r} is there twice; keep one"
                else:
                    seen.add(name)
                    continue
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            mapping: dict[Any, Any] = super().construct_mapping(node, deep=True)
            return mapping

    def construct_float(loader: Any, node: Any) -> float:
        return float(node.value.replace("_", ""))

    def construct_int(loader: Any, node: Any) -> int:
        return int(node.value.replace("_", ""))

    for name, pattern in (
        ("null", re.compile(r"~|null|Null|NULL|")),
        ("bool", re.compile(r"true|True|TRUE|false|False|FALSE")),
        *_NUMBERS.items(),
    ):
        Loader.add_implicit_resolver(_tag(name), re.compile(rf"(?:{pattern.pattern})$"), None)
    Loader.add_constructor(_tag("float"), construct_float)
    Loader.add_constructor(_tag("int"), construct_int)
    return Loader


def _tag(name: str) -> str:
    return f"tag:yaml.org,2002:{name}"
