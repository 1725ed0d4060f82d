"""Rendering of chat templates, bounded in time and size: a template is a program that comes with a model, and may never end.

transformers renders in a sandbox of jinja2, which keeps a template from the machine and does not bound it. Here the same
environment counts: every pass of a loop, call and operator is a step, and every text that is made has its characters. Steps are not
seconds: the same template passes or fails on every machine.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

MAX_STEPS = 5 * 10**6
"""Of one rendering: some seconds. A conversation of a thousand messages takes about 10⁴, and 10⁶ where a template compares each
message with all others."""
MAX_CHARACTERS = 2**27
"""Of all texts that one rendering makes, parts of others included."""
MAX_INTEGER_BITS = 2**16
_LARGE_NUMBER = re.compile(r"\d{7,}|\*")  # a width in a format
_CHARGE, _COUNT, _WALK = "policygrad_charge", "policygrad_count", "policygrad_walk"
_WALK_STEPS = 5  # an element that is looked at takes as long
_ITEM_SIZE = 16  # an element of a list, in characters
_LOOKING_FILTERS = frozenset(
    (
        *("length", "count", "first", "last", "list", "map", "select", "selectattr", "reject", "rejectattr", "items"),
        *("dictsort", "batch", "slice", "reverse", "random", "min", "max", "sum", "attr", "default", "d", "groupby"),
        *("sort", "unique"),
    )
)
"""Filters that make no text of the objects in a list."""


class TemplateOverrunError(Exception):
    """A chat template takes more steps, or makes more text, than a rendering may."""


@dataclass
class _Budget:
    steps: int
    characters: int

    def spend(self, characters: int, steps: int) -> None:
        self.steps -= steps
        self.characters -= characters
        if self.steps < 0:
            raise TemplateOverrunError(f"it takes more than {MAX_STEPS:,} steps, as a loop that does not end")
        if self.characters < 0:
            raise TemplateOverrunError(f"it makes texts of more than {MAX_CHARACTERS:,} characters")


_local = threading.local()


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Bound what transformers renders inside of the context, in this thread."""
    _install()
    before, _local.budget = getattr(_local, "budget", None), _Budget(MAX_STEPS, MAX_CHARACTERS)
    try:
        yield
    finally:
        _local.budget = before


def _spend(characters: int = 0, steps: int = 1) -> None:
    budget = getattr(_local, "budget", None)
    if budget is not None:
        budget.spend(characters, steps)


def _charge(value: Any) -> Any:
    """Return a value that has been made, and spend its size."""
    if isinstance(value, str):
        _spend(len(value))
    else:
        _spend(_ITEM_SIZE * len(value) if isinstance(value, list | tuple) else 0)
    return value


def _walk(value: Any) -> Any:
    """Return a value of which a text is made, or that is compared: lists in lists may stand for far more than they are."""
    if isinstance(value, Mapping):
        for pair in value.items():
            _walk(pair)
    elif isinstance(value, list | tuple):
        for item in value:
            _spend(steps=_WALK_STEPS)
            _walk(item)
    return value


def _show(value: Any) -> Any:
    """Return a value of the output, and spend its size."""
    return _charge(_walk(value))


def _count(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend()
        yield item


@cache
def _install() -> None:
    """Let transformers compile the templates of bounded renderings with an environment that counts, and all others as ever."""
    from transformers.utils import chat_template_utils

    name = "_compile_jinja_template"
    plain: Callable[[str], Any] | None = getattr(chat_template_utils, name, None)
    if plain is None:  # a version that compiles elsewhere
        return
    bounded = cache(partial(_compile, plain))

    def compile_template(template: str) -> Any:
        return (plain if getattr(_local, "budget", None) is None else bounded)(template)

    setattr(chat_template_utils, name, compile_template)


def _compile(plain: Callable[[str], Any], template: str) -> Any:
    """Compile a template in a copy of the environment that `plain` compiles in."""
    original = plain("").environment
    environment = _bounded_class(type(original))(
        trim_blocks=original.trim_blocks,
        lstrip_blocks=original.lstrip_blocks,
        extensions=[type(extension) for extension in original.extensions.values()],
        optimized=False,  # nothing is computed while it is compiled
    )
    environment.globals.update(original.globals)
    environment.tests.update(original.tests)
    environment.filters.update({name: _bound_filter(name, function) for name, function in original.filters.items()})
    environment.filters |= {_CHARGE: _show, _COUNT: _count, _WALK: _walk}
    return environment.from_string(template)


def _bounded_class(base: Any) -> Any:
    from jinja2 import nodes

    class BoundedEnvironment(base):  # type: ignore[misc]
        """Counts loops, operators, calls and texts."""

        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def _generate(self, source: Any, *args: Any, **options: Any) -> Any:
            def wrapped(node: Any, name: str) -> Any:
                return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno).set_environment(self)

            for node in list(source.find_all(nodes.For)):
                node.iter = wrapped(node.iter, _COUNT)
            for node in list(source.find_all((nodes.Output, nodes.Concat))):
                node.nodes = [n if isinstance(n, nodes.TemplateData) else wrapped(n, _CHARGE) for n in node.nodes]
            for node in list(source.find_all(nodes.Compare)):
                node.expr = wrapped(node.expr, _WALK)
                for operand in node.ops:
                    operand.expr = wrapped(operand.expr, _WALK)
            for parent in list(source.find_all(nodes.Node)):
                _replace_fields(parent, nodes.Concat, partial(wrapped, name=_CHARGE))
            return super()._generate(source, *args, **options)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _spend()
            _check_operands(operator, left, right)
            return _charge(super().call_binop(context, operator, left, right))

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            _spend()
            owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
            if isinstance(owner, str):
                _walk(args)
                _check_method(str(__obj.__name__), owner, args)
            elif getattr(__obj, "__name__", "") == "generate_lorem_ipsum":
                _spend(1000 * sum(arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)))
            return _charge(super().call(__context, __obj, *args, **kwargs))

    return BoundedEnvironment


def _replace_fields(parent: Any, kind: Any, change: Callable[[Any], Any]) -> None:
    """Change the children of a node that are of a kind."""
    for name, value in list(parent.iter_fields()):
        if isinstance(value, kind):
            setattr(parent, name, change(value))
        elif isinstance(value, list):
            setattr(parent, name, [change(item) if isinstance(item, kind) else item for item in value])


def _bound_filter(name: str, function: Any) -> Any:
    if not callable(function):
        return function

    @wraps(function)  # with the marks by which jinja2 passes its context
    def bounded(*args: Any, **kwargs: Any) -> Any:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0
        value, rest = (args[passed] if len(args) > passed else None), (*args[passed + 1 :], *kwargs.values())
        _spend()
        if name not in _LOOKING_FILTERS:
            _walk(value)
        if isinstance(value, str):
            _walk(rest)
            _check_method(name, value, rest)
        elif name in ("batch", "slice", "tojson"):
            _check_sizes(rest)
        return _charge(function(*args, **kwargs))

    return bounded


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Spend what an operator is about to make, before it does. Raises TemplateOverrunError."""
    if operator == "%" and isinstance(left, str | bytes):
        _check_format(left)
        _walk(right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 1))
    elif operator == "*":
        numbers = [x for x in (left, right) if isinstance(x, int)]
        texts = [x for x in (left, right) if isinstance(x, str | bytes | list | tuple)]
        if len(numbers) == 2:
            _check_bits(sum(x.bit_length() for x in numbers))
        elif numbers and texts:
            _spend(len(texts[0]) * max(numbers[0], 0))


def _check_method(name: str, text: str, args: tuple[Any, ...]) -> None:
    """Spend what a method of a text, or a filter of that name, is about to make. Raises TemplateOverrunError."""
    if name == "replace" and len(args) >= 2 and all(isinstance(x, str) for x in args[:2]):
        _spend(text.count(args[0]) * len(args[1]))
    elif name == "join" and args:
        _spend(len(text) * (len(args[0]) if hasattr(args[0], "__len__") else 0))
    elif name == "translate":
        _spend(len(text) * max((len(x) for x in getattr(args[0], "values", tuple)() if isinstance(x, str)), default=0))
    elif name in ("format", "format_map"):
        _check_format(text)
    elif name == "indent":
        _check_sizes(args)
        widths = [x if isinstance(x, int) else len(x) for x in args if isinstance(x, int | str)]
        _spend((text.count("\n") + 1) * max(widths, default=0))
    elif name == "wordwrap":
        _spend(len(text) * max((len(x) for x in args if isinstance(x, str)), default=1))
    elif name == "expandtabs":
        _spend(text.count("\t") * max((x for x in args if isinstance(x, int)), default=0))
    else:
        _check_sizes(args)


def _check_sizes(args: tuple[Any, ...]) -> None:
    _spend(max((x for x in args if isinstance(x, int) and not isinstance(x, bool)), default=0))


def _check_format(text: str | bytes) -> None:
    shown = text if isinstance(text, str) else text.decode("latin-1")
    if _LARGE_NUMBER.search(shown):
        raise TemplateOverrunError("it formats a text with a width of a million or more, or one that it computes")


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise TemplateOverrunError(f"it computes a number of more than {MAX_INTEGER_BITS:,} bits")
