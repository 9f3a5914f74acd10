"""Estimators, confidence intervals and paired tests over samples of an evaluation. Pure; numpy is
imported on use. `scores` and the reports call it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from statistics import NormalDist

LEVEL = 0.95
"""Confidence level of every interval."""
EXACT_GAINS = 18
"""Largest number of gains for which all choices of their signs are enumerated: 2^18."""
NUM_DRAWS = 20_000
_DRAWS_AT_ONCE = 1_000
_TINY = 1e-300
_MOST_TERMS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Holds a mean over prompts, and its uncertainty from the choice of prompts."""

    value: float
    low: float
    high: float
    """Upper end of the LEVEL interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Holds A's mean minus B's over the same prompts."""

    estimate: Estimate
    p_value: float
    """Probability of a difference at least this large, in either direction, between equal models.
    """
    test: str
    """mcnemar or permutation."""
    num_prompts: int
    num_a_better: int
    """Number of prompts on which A is better."""
    num_b_better: int


def pass_at(k: int, *, num_samples: int, num_right: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is right, from
    `num_samples` of which `num_right` are: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv
    2107.03374, eq. 1)."""
    assert 1 <= k <= num_samples and 0 <= num_right <= num_samples, (k, num_samples, num_right)
    wrong = num_samples - num_right
    return 1.0 - math.comb(wrong, k) / math.comb(num_samples, k)


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [2**power for power in range(most.bit_length())]


def majority_at(k: int, *, num_right: int, wrong: Sequence[int], num_silent: int = 0) -> float:
    """Return the probability that the most frequent answer of k samples, drawn without replacement,
    is right (Wang et al. 2022, arXiv 2203.11171); ties are broken uniformly at random. `num_right`
    samples gave the right answer, `wrong[i]` the i-th wrong one, and `num_silent` none, which is no
    vote. Exact: a sum over the hypergeometric distribution of votes."""
    num_samples = num_right + sum(wrong) + num_silent
    assert 1 <= k <= num_samples, (k, num_samples)
    total = Fraction(0)
    for votes in range(1, min(k, num_right) + 1):
        ways = _ways(k - votes, most=votes, wrong=wrong, num_silent=num_silent)
        chosen = math.comb(num_right, votes)
        total += sum(Fraction(chosen * many, ties + 1) for ties, many in ways.items())
    return float(total / math.comb(num_samples, k))


def _ways(left: int, *, most: int, wrong: Sequence[int], num_silent: int) -> dict[int, int]:
    """Count the ways to draw `left` samples from those that are not right, with no answer more than
    `most` times; key: the number of answers that occur exactly `most` times."""
    ways = {(0, 0): 1}
    for size in wrong:
        more: dict[tuple[int, int], int] = {}
        for (drawn, ties), many in ways.items():
            for votes in range(min(size, most, left - drawn) + 1):
                place = (drawn + votes, ties + (votes == most))
                more[place] = more.get(place, 0) + many * math.comb(size, votes)
        ways = more
    by_ties = Counter[int]()
    for (drawn, ties), many in ways.items():
        by_ties[ties] += many * math.comb(num_silent, left - drawn)
    return by_ties


def estimate_mean(values: Sequence[float], *, samples_per_prompt: int = 1) -> Estimate:
    """Return the mean of one number per prompt, at least one, and its LEVEL interval. For shares,
    numbers from 0 to 1, it is Wilson's (1927), which also holds at 0 % and 100 %. Shares of several
    samples vary less than single ones, so it counts n mean (1 - mean) / variance for the n prompts
    (Korn and Graubard 1998, Survey Methodology 24:193), and at most all samples. For other numbers
    it is Student's t; a single one of them has no interval."""
    num, mean = len(values), math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1) if num > 1 else 0.0
    if min(values) < 0 or max(values) > 1:
        half = _t(num - 1) * math.sqrt(variance / num) if num > 1 else 0.0
        return Estimate(value=mean, low=mean - half, high=mean + half)
    single = mean * (1 - mean)
    share = variance / single if single else 1.0
    low, high = wilson(mean, num / min(max(share, 1 / samples_per_prompt), 1.0))
    return Estimate(value=mean, low=low, high=high)


def wilson(share: float, num: float) -> tuple[float, float]:
    """Return the LEVEL interval of a share that was seen in `num` draws (Wilson 1927, J. American
    Statistical Association 22:209)."""
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    middle = share + z**2 / (2 * num)
    half = z * math.sqrt(share * (1 - share) / num + z**2 / (4 * num**2))
    scale = 1 + z**2 / num
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def compare_paired(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Test two models on the same prompts, pairwise, with one number of each per prompt: by
    McNemar's test if all are 0 or 1, else by a permutation test."""
    assert len(a) == len(b) and a, (len(a), len(b))
    gains = [one - other for one, other in zip(a, b, strict=True)]
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    is_binary = {*a, *b} <= {0.0, 1.0}
    return Difference(
        estimate=_estimate_gain(gains),
        p_value=mcnemar(better, worse) if is_binary else permutation_p(gains),
        test="mcnemar" if is_binary else "permutation",
        num_prompts=len(gains),
        num_a_better=better,
        num_b_better=worse,
    )


def _estimate_gain(gains: Sequence[float]) -> Estimate:
    """Return the mean and its interval by Student's t. To gains of shares, -1 to 1, half a gain of
    1, half a loss of 1 and one tie are added first: for single answers this is the interval of
    Agresti and Min (2005, Statistics in Medicine 24:729), which keeps a width for ten equal pairs.
    """
    num, mean = len(gains), math.fsum(gains) / len(gains)
    squares = math.fsum(gain**2 for gain in gains)
    centre, spread = mean, squares / num - mean**2
    if is_of_shares := max(map(abs, gains)) <= 1:
        centre = mean * num / (num + 2)
        spread = (squares + 1) / (num + 2) - centre**2
    if num == 1 and not is_of_shares:
        return Estimate(value=mean, low=mean, high=mean)
    freedom = num + 1 if is_of_shares else num - 1
    half = _t(freedom) * math.sqrt(max(spread, 0.0) / freedom)
    low, high = centre - half, centre + half
    if is_of_shares:
        low, high = max(low, -1.0), min(high, 1.0)
    return Estimate(value=mean, low=min(low, mean), high=max(high, mean))


def permutation_p(gains: Sequence[float]) -> float:
    """Return the two-sided p of the permutation test of paired differences: the share of all
    choices of signs, equally likely if the models are equal, with a sum at least as far from 0
    (Fisher 1935, The Design of Experiments, 21). Exact up to EXACT_GAINS differences other than 0;
    beyond that from NUM_DRAWS choices, which depend only on the number of differences."""
    import numpy as np

    sizes = np.abs([gain for gain in gains if gain])
    seen = abs(math.fsum(gains)) * (1 - 1e-12)
    if not seen:
        return 1.0
    if len(sizes) <= EXACT_GAINS:
        sums = np.zeros(1)
        for size in sizes:
            sums = np.concatenate([sums + size, sums - size])
        return float(np.mean(np.abs(sums) >= seen))
    generator, as_far = np.random.default_rng(0), 0
    for _ in range(NUM_DRAWS // _DRAWS_AT_ONCE):
        signs = generator.integers(2, size=(_DRAWS_AT_ONCE, len(sizes)), dtype=np.int8) * 2 - 1
        as_far += int(np.sum(np.abs(signs @ sizes) >= seen))
    return (as_far + 1) / (NUM_DRAWS + 1)


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the two-sided p of the exact test: of the prompts that exactly one of two models gets
    right, each would get half (McNemar 1947; the binomial instead of chi-squared)."""
    fewer, more = sorted((only_a, only_b))
    if fewer == more:
        return 1.0
    # the binomial's tail as a beta function (Abramowitz and Stegun 1964, 26.5.24)
    return min(1.0, 2 * _beta_share(0.5, more, fewer + 1))


def two_sided_p(t: float, freedom: int) -> float:
    """Return the probability of a |t| at least as large: I_x(v/2, 1/2) with x = v / (v + t^2)
    (Abramowitz and Stegun 1964, 26.7.1)."""
    if t * t < freedom:  # else a chance near 1 loses its digits
        return 1 - _beta_share(t * t / (freedom + t * t), 0.5, freedom / 2)
    return _beta_share(freedom / (freedom + t * t), freedom / 2, 0.5)


@cache
def t_quantile(share: float, freedom: int) -> float:
    """Return the t below which `share` of the distribution lies; `share` must be above one half."""
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


def _t(freedom: int) -> float:
    return t_quantile(0.5 + LEVEL / 2, freedom)


def _beta_share(x: float, a: float, b: float) -> float:
    """Compute the regularised incomplete beta function I_x(a, b), by its continued fraction
    (Abramowitz and Stegun 1964, 26.5.8), evaluated by Lentz's method."""
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


def describe_difference(difference: Difference, *, a: str, b: str) -> str:
    """Return a sentence that says which model is better, and how certain that is."""
    estimate, alpha = difference.estimate, 1 - LEVEL
    test = "McNemar's exact test" if difference.test == "mcnemar" else "a paired permutation test"
    facts = (
        f"{a} less {b}: {100 * estimate.value:+.1f} points ({LEVEL:.0%} interval "
        f"{100 * estimate.low:+.1f} to {100 * estimate.high:+.1f}) over {difference.num_prompts:,} "
        f"prompts, {a} is better on {difference.num_a_better:,} of them and {b} on "
        f"{difference.num_b_better:,}; p = {difference.p_value:.2g} by {test}."
    )
    if difference.p_value >= alpha:
        return f"No difference can be told from chance. {facts}"
    winner, loser = (a, b) if estimate.value > 0 else (b, a)
    return f"{winner} scores higher than {loser}, and chance alone would seldom show it. {facts}"
