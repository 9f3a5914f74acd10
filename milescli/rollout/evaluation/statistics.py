"""Estimators, confidence intervals and paired tests over samples of an evaluation. Pure; numpy is
imported on use. `scores` and the reports call it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

LEVEL = 0.95
"""Confidence level of every interval."""
NUM_RESAMPLES = 10_000
_CHUNK = 2**22
"""Numbers that are drawn at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Holds a mean over prompts, and its uncertainty from the choice of prompts."""

    value: float
    low: float
    high: float
    """Upper end of the LEVEL interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Holds A's mean less B's over the same prompts."""

    estimate: Estimate
    p_value: float
    """The chance of a difference as large as this, either way, between equals."""
    test: str
    """mcnemar or bootstrap."""
    num_prompts: int
    num_a_better: int
    """Prompts."""
    num_b_better: int


def pass_at(k: int, *, num_samples: int, num_right: int) -> float:
    """The chance that one of k samples at least is right, without bias, of `num_samples` of which
    `num_right` are: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1)."""
    assert 1 <= k <= num_samples and 0 <= num_right <= num_samples, (k, num_samples, num_right)
    wrong = num_samples - num_right
    return 1.0 - math.comb(wrong, k) / math.comb(num_samples, k)


def doublings(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [2**power for power in range(most.bit_length())]


def majority_at(k: int, *, num_right: int, wrong: Sequence[int], num_silent: int = 0) -> float:
    """The chance that the most frequent answer of k samples, drawn without putting back, is right
    (Wang et al. 2022, arXiv 2203.11171); of equally frequent ones each is taken equally often.

    `num_right` samples gave the right answer, `wrong[i]` the i-th wrong one, and `num_silent` none,
    which is no vote. Exact: a sum over the hypergeometric distribution of votes.
    """
    num_samples = num_right + sum(wrong) + num_silent
    assert 1 <= k <= num_samples, (k, num_samples)
    total = Fraction(0)
    for votes in range(1, min(k, num_right) + 1):
        ways = _ways(k - votes, most=votes, wrong=wrong, num_silent=num_silent)
        chosen = math.comb(num_right, votes)
        total += sum(Fraction(chosen * many, ties + 1) for ties, many in ways.items())
    return float(total / math.comb(num_samples, k))


def _ways(left: int, *, most: int, wrong: Sequence[int], num_silent: int) -> dict[int, int]:
    """In how many ways `left` samples can be drawn of those that are not right, no answer more than
    `most` times: by the number of answers that come up just so often."""
    ways = {(drawn, 0): math.comb(num_silent, drawn) for drawn in range(left + 1)}
    for size in wrong:
        more: dict[tuple[int, int], int] = {}
        for (drawn, ties), many in ways.items():
            for votes in range(min(size, most, left - drawn) + 1):
                place = (drawn + votes, ties + (votes == most))
                more[place] = more.get(place, 0) + many * math.comb(size, votes)
        ways = more
    return {ties: many for (drawn, ties), many in ways.items() if drawn == left and many}


def estimated(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean of one number for each prompt, at least one, and its percentile bootstrap interval
    (Efron and Tibshirani 1993, ch. 13), which draws prompts anew; equal seeds give equal ones."""
    import numpy as np

    assert values, "a mean over no prompt"
    low, high = np.quantile(_means(values, seed), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value=math.fsum(values) / len(values), low=float(low), high=float(high))


def _means(values: Sequence[float], seed: int):
    """[NUM_RESAMPLES] means of as many values, drawn with putting back."""
    import numpy as np

    drawn, generator = np.asarray(values, np.float64), np.random.default_rng(seed)
    at_once, means = max(1, _CHUNK // len(drawn)), []
    for start in range(0, NUM_RESAMPLES, at_once):
        shape = (min(at_once, NUM_RESAMPLES - start), len(drawn))
        means.append(drawn[generator.integers(len(drawn), size=shape)].mean(axis=1))
    return np.concatenate(means)


def compared(a: Sequence[float], b: Sequence[float], *, seed: int = 0) -> Difference:
    """Test two models on the same prompts, pairwise, with one number of each per prompt. If all are
    0 or 1 the test is McNemar's, else a bootstrap."""
    assert len(a) == len(b) and a, (len(a), len(b))
    gains = [one - other for one, other in zip(a, b, strict=True)]
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    is_binary = {*a, *b} <= {0.0, 1.0}
    return Difference(
        estimate=estimated(gains, seed=seed),
        p_value=mcnemar(better, worse) if is_binary else _p_of_mean(gains, seed),
        test="mcnemar" if is_binary else "bootstrap",
        num_prompts=len(gains),
        num_a_better=better,
        num_b_better=worse,
    )


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the two-sided p of the exact test: of the prompts that exactly one of two models gets
    right, each would get half (McNemar 1947; the binomial instead of chi-squared)."""
    num, fewer = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(num, count) for count in range(fewer + 1))
    return min(1.0, float(Fraction(2 * tail, 2**num)))


def _p_of_mean(gains: Sequence[float], seed: int) -> float:
    """The share of means, drawn anew as if the true one were 0, that are as far from 0 as the one
    that was seen (Efron and Tibshirani 1993, alg. 16.2)."""
    import numpy as np

    mean = math.fsum(gains) / len(gains)
    if not mean:
        return 1.0
    means = _means([gain - mean for gain in gains], seed)
    as_far = int(np.sum(np.abs(means) >= abs(mean) - 1e-12))
    return (as_far + 1) / (NUM_RESAMPLES + 1)


def in_words(difference: Difference, *, a: str, b: str) -> str:
    """Return a plain sentence on who is better, and how certain that is."""
    estimate, alpha = difference.estimate, 1 - LEVEL
    test = "McNemar's exact test" if difference.test == "mcnemar" else "a paired bootstrap"
    facts = (
        f"{a} less {b}: {100 * estimate.value:+.1f} points ({LEVEL:.0%} interval "
        f"{100 * estimate.low:+.1f} to {100 * estimate.high:+.1f}) over {difference.num_prompts:,} "
        f"prompts, {a} is better on {difference.num_a_better:,} of them and {b} on "
        f"{difference.num_b_better:,}; p = {difference.p_value:.2g} by {test}."
    )
    if difference.p_value >= alpha:
        return f"No difference can be told from chance. {facts}"
    winner, loser = (a, b) if estimate.value > 0 else (b, a)
    return f"{winner} is better than {loser}, and chance alone would seldom show it. {facts}"
