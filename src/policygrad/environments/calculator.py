"""An exact, bounded calculator as a tool: arithmetic that a model cannot do in its head.

A module of its own because defining a tool loads transformers, which `--environment calculator` alone needs.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import isfinite

from policygrad.environments.tools import ToolUse

MAX_BITS = 8192
"""Of a numerator or denominator, on the way too."""
MAX_CHARACTERS = 300
_TWO: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """Works out arithmetic, exactly: + - * / // % ** and brackets.

    Args:
        expression: Such as (12345 - 678) * 90 / 7
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"{expression!r} is no arithmetic") from None
    return str(_value(tree.body))


def _value(node: ast.expr) -> Fraction:
    """Raises ValueError for what is no arithmetic or grows too large, ZeroDivisionError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        if not isfinite(node.value):
            raise ValueError("the number is too large")
        return _bounded(Fraction(str(node.value)))  # 0.1 is a tenth
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if (work := _TWO.get(type(node.op))) is not None:
            return _bounded(Fraction(work(left, right)))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Looked at before it is worked out: towers of powers have no room anywhere."""
    if exponent.denominator != 1:
        raise ValueError(f"the exponent {exponent} is no whole number")
    if abs(exponent) * _bits(base) > MAX_BITS:
        raise ValueError("the number is too large")
    return _bounded(Fraction(base ** int(exponent)))


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise ValueError("the number is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


CALCULATOR = ToolUse((calculate,))
"""`--environment calculator`, with a task's own reward functions, which have to be named: `--reward reasoning_gym`."""
