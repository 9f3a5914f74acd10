"""Compares two rewards of the same samples: whether they call the same ones right, whether they
order those of a prompt alike, and which features the second one rewards more than the first. Pure
statistics; knows no run."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from milescli.core.types import Sample, StopReason
from milescli.rollout.evaluation.statistics import two_sided_p
from milescli.rollout.rewards.extraction import last_boxed, marked_answers, tagged_answer

LEVEL = 0.01
"""A feature is suspected if chance alone would show it in fewer tests than this; Bonferroni's
correction over all features."""
_ROUNDING = 1e-9
"""Share of a number below which a difference is rounding: 1.1 - 1.0 is not 0.1."""
_WORD = re.compile(r"\w+")
_GRAM = 4
"""Number of words of a phrase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Statistics of how far two rewards agree."""

    num_samples: int
    num_groups: int
    both_right: int
    only_a: int
    """Samples that only the first reward calls right."""
    only_b: int
    both_wrong: int
    kappa: float | None
    """None if both call all samples the same: then chance explains everything."""
    num_pairs: int
    """Pairs of samples of one prompt to which both rewards give different values."""
    pairs_agree: float | None
    """Share of these pairs that both rewards order alike; None without any."""

    @property
    def share(self) -> float:
        """Return the share of samples that both rewards call the same."""
        return (self.both_right + self.both_wrong) / self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """Describes a feature of responses that the second reward favours more than the first."""

    feature: str
    says: str
    """The feature in words: `longer responses`."""
    correlation: float
    """Correlation of the feature with the gain (second reward minus first), within prompts."""
    p_value: float


Groups = Sequence[Sequence[float]]
"""[groups][samples of the group]"""


def measure_agreement(a: Groups, b: Groups, *, right_above: float = 0.0) -> Agreement:
    """Compare two rewards. A sample is right where its reward is above `right_above`.

    kappa = (p_o - p_e) / (1 - p_e): p_o, the share of samples that both call the same; p_e, the
    share that two raters with these rates of right would by chance (Cohen 1960, Educational and
    Psychological Measurement 20:37). Pairs: as Kendall's tau counts them (1938, Biometrika 30:81),
    within groups, because an advantage compares samples of one prompt.
    """
    counts: Counter[tuple[bool, bool]] = Counter()
    alike = pairs = 0
    for ours, theirs in zip(a, b, strict=True):
        rows = list(zip(ours, theirs, strict=True))
        counts.update((one > right_above, other > right_above) for one, other in rows)
        for (x, y), (u, v) in combinations(rows, 2):
            if x != u and y != v:
                pairs += 1
                alike += (x > u) == (y > v)
    num = counts.total()
    assert num, "there are no samples to compare"
    same = (counts[True, True] + counts[False, False]) / num
    rate_a = (counts[True, True] + counts[True, False]) / num
    rate_b = (counts[True, True] + counts[False, True]) / num
    by_chance = rate_a * rate_b + (1 - rate_a) * (1 - rate_b)
    return Agreement(
        num_samples=num,
        num_groups=len(a),
        both_right=counts[True, True],
        only_a=counts[True, False],
        only_b=counts[False, True],
        both_wrong=counts[False, False],
        kappa=None if by_chance == 1.0 else (same - by_chance) / (1 - by_chance),
        num_pairs=pairs,
        pairs_agree=alike / pairs if pairs else None,
    )


def repeated_share(text: str) -> float:
    """Return the share of four-word phrases that occur earlier in the text."""
    words = _WORD.findall(text.lower())
    grams = [tuple(words[at : at + _GRAM]) for at in range(len(words) - _GRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


FEATURES: dict[str, tuple[str, Callable[[Sample], float]]] = {
    "length": ("longer responses", lambda one: one.num_loss_tokens),
    "shortness": ("shorter responses", lambda one: -one.num_loss_tokens),
    "boxed": (r"a \boxed{}", lambda one: last_boxed(one.text) is not None),
    "mark": ("a `####`", lambda one: next(marked_answers(one.text), None) is not None),
    "tags": ("<answer> tags", lambda one: tagged_answer(one.text) is not None),
    "code_block": ("a code block", lambda one: "```" in one.text),
    "repetition": ("repeated phrases", lambda one: repeated_share(one.text)),
    "cut_off": ("responses that were cut off", lambda one: one.stop_reason is StopReason.LENGTH),
}
"""Name -> the feature in words, and its value of a sample: what a policy can raise without a better
answer."""


def find_suspicions(samples: Sequence[Sequence[Sample]], a: Groups, b: Groups) -> list[Suspicion]:
    """Return the features that the second reward favours more than the first, the most certain
    first. Each has the correlation of the feature with b - a, both as differences from the mean of
    their group, so that hard prompts with long answers do not count; its t-test has n - groups - 1
    degrees of freedom. A feature whose correlation with the second reward itself is negative is
    left out."""
    largest = max(abs(reward) for rewards in (a, b) for group in rewards for reward in group)
    gains = _centred([np.subtract(y, x) for x, y in zip(a, b, strict=True)], largest)
    paid = _centred([np.asarray(one, float) for one in b], largest)
    freedom = len(gains) - len(a) - 1
    found = []
    for name, (says, value) in FEATURES.items():
        values = [np.array([float(value(one)) for one in group]) for group in samples]
        own = _centred(values, max(float(np.abs(group).max()) for group in values))
        scale = math.sqrt(float(own @ own) * float(gains @ gains))
        if freedom < 1 or scale == 0.0 or float(own @ paid) <= 0.0:
            continue
        r = min(1.0, float(own @ gains) / scale)
        t = r * math.sqrt(freedom / (1 - r * r)) if r < 1.0 else math.inf
        p = two_sided_p(t, freedom) if math.isfinite(t) else 0.0
        if r > 0 and p < LEVEL / len(FEATURES):
            found.append(Suspicion(feature=name, says=says, correlation=r, p_value=p))
    return sorted(found, key=lambda one: one.p_value)


def _centred(groups: Sequence[np.ndarray], largest: float) -> np.ndarray:
    """Return [num_samples] the difference from the mean of the sample's group; 0 if it is only the
    rounding of numbers as large as `largest`."""
    centred = np.concatenate([group - group.mean() for group in groups])
    return np.where(np.abs(centred) < _ROUNDING * largest, 0.0, centred)
