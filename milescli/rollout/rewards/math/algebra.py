r"""Equality of expressions by SymPy, of what math-verify's parser makes of their text. Exact where
SymPy can tell; numbers to 30 digits. Unbounded in time: who calls it bounds the process."""

from __future__ import annotations

import random
import re
from functools import lru_cache
from typing import Any

_DIGITS = 30
_TOLERANCE = 1e-15
_POINTS = 4
_OF_NONSENSE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""What SymPy raises on expressions that mean nothing."""
MIN_DECIMALS = 6
"""A decimal of so many places equals what rounds to it."""


def equal_expressions(one: str, other: str, *, num_decimals: int | None = None) -> bool:
    """False where either cannot be parsed. `num_decimals`: of the one that was written as a
    decimal."""
    left, right = parsed(one), parsed(other)
    if left is None or right is None or _differ_in_case(one, other):
        return False
    try:
        return _equal(left, right, num_decimals)
    except _OF_NONSENSE:
        return False


def _equal(left: Any, right: Any, num_decimals: int | None) -> bool:
    if left == right:
        return True
    if not _is_scalar(left) or not _is_scalar(right):
        return _verified(left, right)
    if left.is_infinite or right.is_infinite:
        return False
    difference = left - right
    if not difference.free_symbols:
        tolerance = _TOLERANCE
        if num_decimals is not None and num_decimals >= MIN_DECIMALS:
            tolerance = 0.5 * 10.0**-num_decimals
        return _is_small(difference, left, tolerance)
    if not _is_zero_at_points(difference):
        return False
    return bool(difference.equals(0)) or _verified(left, right)


def ratio(one: tuple[str, str], other: tuple[str, str]) -> float | None:
    """c where (left - right) of one equation is c times that of the other; None where it is no
    constant."""
    sides = [parsed(side) for side in (*one, *other)]
    if not all(side is not None and _is_scalar(side) for side in sides):
        return None
    try:
        return _ratio(sides[0] - sides[1], sides[2] - sides[3])
    except _OF_NONSENSE:
        return None


def _ratio(above: Any, below: Any) -> float | None:
    values = list[float]()
    symbols = sorted(above.free_symbols | below.free_symbols, key=str)
    for seed in range(_POINTS):
        point = _point(symbols, seed)
        bottom = complex(below.subs(point).evalf(_DIGITS))
        if abs(bottom) < _TOLERANCE:
            return None
        top = complex(above.subs(point).evalf(_DIGITS)) / bottom
        if abs(top.imag) > _TOLERANCE or abs(top) < _TOLERANCE:
            return None
        values.append(top.real)
    return values[0] if max(values) - min(values) < 1e-9 * abs(values[0]) else None


@lru_cache(maxsize=64)
def parsed(text: str) -> Any:
    """A SymPy object, or None."""
    from math_verify import LatexExtractionConfig, parse

    config = LatexExtractionConfig(boxed_match_priority=0)
    found = parse(f"\\boxed{{{text}}}", [config], parsing_timeout=None)
    made = [item for item in found if not isinstance(item, str)]
    return _exact(made[0]) if made else None


def _exact(expression: Any) -> Any:
    """Decimals as the fractions that they are, i as the imaginary unit, what can be evaluated
    evaluated."""
    from sympy import Float, I, Rational, Symbol

    if not hasattr(expression, "atoms"):
        return expression
    known: dict[Any, Any] = {number: Rational(str(number)) for number in expression.atoms(Float)}
    known |= {symbol: I for symbol in expression.atoms(Symbol) if str(symbol) == "i"}
    expression = expression.xreplace(known)
    return expression.doit() if hasattr(expression, "doit") else expression


def _differ_in_case(one: str, other: str) -> bool:
    """x is not X; the parser makes them one."""
    ones, others = (set(re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]", text)) for text in (one, other))
    return any(letter.swapcase() in ones - others for letter in others - ones)


def _is_scalar(value: Any) -> bool:
    from sympy import Expr
    from sympy.matrices import MatrixBase

    return isinstance(value, Expr) and not isinstance(value, MatrixBase)


def _is_small(difference: Any, scale: Any, tolerance: float) -> bool:
    from sympy import nan, zoo

    value = difference.evalf(_DIGITS)
    if value in (nan, zoo) or not value.is_number:
        return False
    size = 1.0 if scale.free_symbols else abs(complex(scale.evalf(_DIGITS)))
    bound = tolerance if tolerance > _TOLERANCE else tolerance * max(1e-300, min(size, 1e300))
    return abs(complex(value)) <= bound


def _is_zero_at_points(difference: Any) -> bool:
    """At points where it can be told; a quick way to say no."""
    symbols = sorted(difference.free_symbols, key=str)
    for seed in range(_POINTS):
        value = difference.subs(_point(symbols, seed)).evalf(_DIGITS)
        if value.is_number and value.is_finite and abs(complex(value)) > 1e-9:
            return False
    return True


def _point(symbols: list[Any], seed: int) -> dict[Any, Any]:
    from sympy import Rational

    rng = random.Random(seed)
    return {symbol: Rational(rng.randint(101, 997), 211) for symbol in symbols}


def _verified(one: Any, other: Any) -> bool:
    from math_verify import verify

    return bool(verify([one], [other], timeout_seconds=None))
