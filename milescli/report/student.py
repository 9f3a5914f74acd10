"""Student's t: chances and quantiles, by the incomplete beta function. Pure, no library."""

from __future__ import annotations

import math
from functools import cache

_TINY = 1e-300
_MOST_TERMS = 400


def two_sided_p(t: float, freedom: int) -> float:
    """The chance of a |t| as large as this: I_x(v/2, 1/2) with x = v / (v + t^2) (Abramowitz and
    Stegun 1964, 26.7.1)."""
    if t * t < freedom:  # else a chance near 1 loses its digits
        return 1 - _beta_share(t * t / (freedom + t * t), 0.5, freedom / 2)
    return _beta_share(freedom / (freedom + t * t), freedom / 2, 0.5)


@cache
def t_quantile(share: float, freedom: int) -> float:
    """The t under which `share` of all lie, above one half."""
    assert 0.5 < share < 1, share
    low, high = 0.0, 1.0
    while 1 - two_sided_p(high, freedom) / 2 < share:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if 1 - two_sided_p(middle, freedom) / 2 < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _beta_share(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Abramowitz and
    Stegun 1964, 26.5.8), evaluated by Lentz's method."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_share(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    return front * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    above, below = 1.0, 0.0
    value = 1.0
    for term in range(_MOST_TERMS):
        half = term // 2
        if term == 0:
            part = 1.0
        elif term % 2 == 0:
            part = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        else:
            part = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        below = 1 + part * below
        below = 1 / (below if abs(below) > _TINY else _TINY)
        above = 1 + part / above
        above = above if abs(above) > _TINY else _TINY
        value *= above * below
        if term and abs(above * below - 1) < 1e-14:
            break
    return value - 1
