"""A tool that computes arithmetic. It evaluates no code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 1000
MAX_DIGITS = 4000
"""Largest number of digits of a power; a larger result would take the calculator's time, not the
model's."""
_OF_TWO: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_OF_ONE: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and parentheses

    Raises ValueError or ArithmeticError for what is none.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression may have at most {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise ValueError(f"`{expression}` is not an arithmetic expression") from None
    try:
        value = _value(tree.body)
    except RecursionError:
        raise ValueError("the arithmetic is nested too deeply") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OF_ONE:
        return _OF_ONE[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OF_TWO:
            return _OF_TWO[type(node.op)](left, right)
    raise ValueError(f"`{ast.unparse(node)}` is not arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    if base and abs(exponent) * abs(math.log10(abs(base))) > MAX_DIGITS:
        raise ValueError("the power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the root of a negative number is not real")
    return value
