"""Compares expressions with SymPy, as math-verify's parser reads their text: rationals exactly,
other numbers to 200 digits. Its time is not bounded; the caller bounds the process."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

_DIGITS = 30
_MAX_DIGITS = 200
_POINTS = 4
_OF_NONSENSE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""Exceptions of SymPy for meaningless expressions."""
MIN_DECIMALS = 6
"""A decimal with at least this many places equals a number that rounds to it."""


def equal_expressions(one: str, other: str, *, num_decimals: int | None = None) -> bool:
    """Return True if the expressions are equal; False if either cannot be parsed. `num_decimals`:
    number of decimals of the expression that was written as a decimal."""
    left, right = parse_expression(one), parse_expression(other)
    if left is None or right is None or _differ_in_case(one, other):
        return False
    try:
        return _equal(left, right, num_decimals)
    except _OF_NONSENSE:
        return False


def _equal(left: Any, right: Any, num_decimals: int | None) -> bool:
    from sympy import nan, zoo

    if not _is_scalar(left) or not _is_scalar(right):
        return left == right or _verified(left, right)
    if left.has(zoo, nan) or right.has(zoo, nan):
        return False  # 1/0 is no number, and so not the same as another one
    if left == right:
        return True
    if left.is_infinite or right.is_infinite:
        return False
    difference = left - right
    if difference.free_symbols:
        return _is_zero_everywhere(difference)
    if num_decimals is not None and num_decimals >= MIN_DECIMALS:
        return _is_within(difference, 0.5 * 10.0**-num_decimals)
    return _is_zero(difference)


def ratio(one: tuple[str, str], other: tuple[str, str]) -> float | None:
    """Return c if (left - right) of one equation is c times that of the other; None if there is no
    such constant."""
    sides = [parse_expression(side) for side in (*one, *other)]
    if not all(side is not None and _is_scalar(side) for side in sides):
        return None
    try:
        return _ratio(sides[0] - sides[1], sides[2] - sides[3])
    except _OF_NONSENSE:
        return None


def _ratio(above: Any, below: Any) -> float | None:
    symbols = sorted(above.free_symbols | below.free_symbols, key=str)
    for seed in range(_POINTS):
        point = _point(symbols, seed)
        bottom = below.subs(point)
        if not _is_zero(bottom):
            factor = above.subs(point) / bottom
            break
    else:
        return None
    if _is_zero(factor) or not _is_zero(factor.as_real_imag()[1]):
        return None
    return float(factor) if _is_zero_everywhere(above - factor * below) else None


@lru_cache(maxsize=64)
def parse_expression(text: str) -> Any:
    """Return the SymPy object of a text, or None."""
    from math_verify import LatexExtractionConfig, parse

    # `answer` has taken the units off: what is left of `x + c` is a variable, no cent
    spelling = replace(LatexExtractionConfig().normalization_config, units=False)
    config = LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)
    found = parse(f"\\boxed{{{text}}}", [config], parsing_timeout=None)
    made = [item for item in found if not isinstance(item, str)]
    return _exact(made[0]) if made else None


def _exact(expression: Any) -> Any:
    """Return the expression with decimals as fractions, a free i as the imaginary unit, all other
    symbols as real numbers (the parser reads x as no real number where the text has an i), and
    evaluated as far as possible; None if it is meaningless, like max(i, 1)."""
    from sympy import Float, I, Rational, Symbol

    if not hasattr(expression, "atoms"):
        return expression
    known: dict[Any, Any] = {number: Rational(str(number)) for number in expression.atoms(Float)}
    known |= {one: Symbol(one.name, real=True) for one in expression.atoms(Symbol)}
    known |= {one: I for one in expression.free_symbols if str(one) == "i"}
    try:
        expression = expression.xreplace(known)
        return expression.doit() if hasattr(expression, "doit") else expression
    except _OF_NONSENSE:
        return None


def _differ_in_case(one: str, other: str) -> bool:
    """Return True if the texts use a letter in different case: x is not X, but the parser makes
    them equal."""
    ones, others = (set(re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]", text)) for text in (one, other))
    return any(letter.swapcase() in ones - others for letter in others - ones)


def _is_scalar(value: Any) -> bool:
    from sympy import Expr
    from sympy.matrices import MatrixBase

    return isinstance(value, Expr) and not isinstance(value, MatrixBase)


def _is_zero(number: Any) -> bool:
    """Return True if an expression without symbols is zero: a rational exactly, any other to
    `_MAX_DIGITS` digits, which SymPy uses until 30 digits of the result are known."""
    if number.is_Rational:
        return bool(number == 0)
    value = number.evalf(_DIGITS, maxn=_MAX_DIGITS)
    return value.is_number and value.is_finite and all(map(_has_no_digits, value.as_real_imag()))


def _has_no_digits(part: Any) -> bool:
    """Return True if SymPy found no digit of a real number, so that it is close to zero."""
    return bool(part == 0) or (part.is_Float and part._prec == 1)


def _is_within(number: Any, tolerance: float) -> bool:
    value = number.evalf(_DIGITS)
    return value.is_number and value.is_finite and abs(complex(value)) <= tolerance


def _is_zero_everywhere(difference: Any) -> bool:
    """Return True if the expression is zero for all values of its symbols; if it has roots or
    logarithms of them, for all positive values."""
    from sympy import Abs, Symbol, expand_log, powdenest

    symbols = sorted(difference.free_symbols, key=str)
    for seed in range(_POINTS):
        value = difference.subs(_point(symbols, seed))
        if value.evalf(_DIGITS).is_finite and not _is_zero(value):
            return False
    is_zero = difference.equals(0)
    if is_zero or difference.has(Abs):
        return bool(is_zero)
    positive = difference.xreplace({one: Symbol(str(one), positive=True) for one in symbols})
    if positive == 0 or positive.equals(0):
        return True
    return bool(expand_log(powdenest(positive, force=True), force=True).equals(0))


def _point(symbols: list[Any], seed: int) -> dict[Any, Any]:
    from sympy import Rational

    rng = random.Random(seed)
    return {symbol: Rational(rng.randint(101, 997), 211) for symbol in symbols}


def _verified(one: Any, other: Any) -> bool:
    from math_verify import verify

    return bool(verify([one], [other], timeout_seconds=None))
