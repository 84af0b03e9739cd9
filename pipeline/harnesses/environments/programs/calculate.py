"""Evaluate the arithmetic expression on stdin and print its value. Exit 2, with the reason on stdout, when refused.

Only numbers, + - * / // % ** and parentheses: the syntax tree is walked, nothing is ever evaluated as Python.
"""

import ast
import operator
import sys
from collections.abc import Callable

MAX_CHARACTERS = 1000
MAX_BITS = 4096
Number = int | float


class Refused(ValueError):
    """An expression that is not arithmetic, or whose value would be too large."""


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression; raises `Refused` with the reason."""
    if len(expression) > MAX_CHARACTERS:
        raise Refused(f"the expression has {len(expression)} characters, the limit is {MAX_CHARACTERS}")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError, ZeroDivisionError) as error:
        if isinstance(error, Refused):
            raise
        reason = (
            "division by zero" if isinstance(error, ZeroDivisionError) else "not an arithmetic expression"
        )
        raise Refused(reason) from None


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > MAX_BITS or (isinstance(base, int) and base.bit_length() * abs(exponent) > MAX_BITS):
        raise Refused("the power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise Refused("the value is not a real number")
    return value


def _divide(a: Number, b: Number) -> Number:
    return a / b


def _floor_divide(a: Number, b: Number) -> Number:
    return a // b


_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: _floor_divide,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Number = node.value  # pyright: ignore[reportAssignmentType]  # narrowed by type() just above
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_value(node.operand))
    else:
        raise Refused(f"{type(node).__name__} is not arithmetic")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise Refused("the value is too large")
    return value


if __name__ == "__main__":
    try:
        print(evaluate(sys.stdin.read(MAX_CHARACTERS + 1)))
    except (Refused, UnicodeDecodeError) as refusal:
        print(refusal if isinstance(refusal, Refused) else "not an arithmetic expression")
        sys.exit(2)
