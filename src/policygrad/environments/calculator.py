"""An exact, bounded calculator tool.

It is a separate module because defining a tool imports transformers, which only `--environment calculator` needs.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import isfinite

from policygrad.environments.tools import ToolUse

MAX_BITS = 8192  # size limit of numerators and denominators, in intermediate results too
MAX_CHARACTERS = 300
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
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
    return str(_evaluate(tree.body))


def _evaluate(node: ast.expr) -> Fraction:
    """Raises ValueError for anything but arithmetic and for numbers that grow too large, and ZeroDivisionError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        if not isfinite(node.value):
            raise ValueError("the number is too large")
        return _check_size(Fraction(str(node.value)))  # 0.1 is a tenth
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow):
            # the size is checked before computing: towers of powers would fill all memory
            if right.denominator != 1:
                raise ValueError(f"the exponent {right} is no whole number")
            if abs(right) * _count_bits(left) > MAX_BITS:
                raise ValueError("the number is too large")
            return _check_size(Fraction(left ** int(right)))
        if (function := _OPERATORS.get(type(node.op))) is not None:
            return _check_size(Fraction(function(left, right)))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")


def _check_size(value: Fraction) -> Fraction:
    if _count_bits(value) > MAX_BITS:
        raise ValueError("the number is too large")
    return value


def _count_bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


CALCULATOR = ToolUse((calculate,))
"""`--environment calculator`. It has no reward of its own: name the task's reward functions, e.g. `--reward reasoning_gym`."""
