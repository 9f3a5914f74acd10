"""Kappa and pairs by worked examples; a feature is suspected where a reward pays for it alone."""

from __future__ import annotations

import random

import pytest

from milescli.core.types import Sample, StopReason
from milescli.rollout.evaluation.agreement import find_suspicions, measure_agreement, repeated_share


def sample(text: str, *, num_tokens: int = 8, is_cut: bool = False) -> Sample:
    return Sample(
        sample_index=0,
        seed=0,
        trajectories=[],
        text=text,
        stop_reason=StopReason.LENGTH if is_cut else StopReason.STOP,
        num_counted_tokens=num_tokens,
    )


def test_kappa_is_that_of_a_worked_example() -> None:
    # both right 20, only a 5, only b 10, both wrong 15: p_o = 0.7, p_e = 0.5, kappa = 0.4
    a = [[1.0] * 25 + [0.0] * 25]
    b = [[1.0] * 20 + [0.0] * 5 + [1.0] * 10 + [0.0] * 15]
    found = measure_agreement(a, b)
    assert (found.both_right, found.only_a, found.only_b, found.both_wrong) == (20, 5, 10, 15)
    assert found.share == pytest.approx(0.7) and found.kappa == pytest.approx(0.4)


def test_two_rewards_that_never_differ_have_no_kappa() -> None:
    assert measure_agreement([[1.0, 1.0]], [[1.0, 0.5]]).kappa is None


def test_pairs_are_counted_within_a_prompt_alone() -> None:
    found = measure_agreement([[0.0, 1.0, 2.0], [5.0]], [[0.0, 2.0, 1.0], [-5.0]], right_above=0.5)
    assert found.num_pairs == 3 and found.pairs_agree == pytest.approx(2 / 3)


def test_a_threshold_says_what_is_right() -> None:
    assert measure_agreement([[0.4, 0.6]], [[0.4, 0.6]], right_above=0.5).both_right == 1


@pytest.mark.parametrize("pays_for", ["length", "boxed", "cut_off"])
def test_a_reward_that_pays_for_a_feature_is_suspected_of_it(pays_for: str) -> None:
    draw = random.Random(0)
    groups, a, b = [], [], []
    for _ in range(12):
        length, box, cut = ([draw.random() < 0.5 for _ in range(8)] for _ in range(3))
        groups.append(
            [
                sample(r"so \boxed{5}" if x else "so 5", num_tokens=90 if y else 20, is_cut=z)
                for x, y, z in zip(box, length, cut, strict=True)
            ]
        )
        right = [float(draw.random() < 0.5) for _ in range(8)]
        feature = {"length": length, "boxed": box, "cut_off": cut}[pays_for]
        a.append(right)
        b.append([one + 0.5 * paid for one, paid in zip(right, feature, strict=True)])
    assert [one.feature for one in find_suspicions(groups, a, b)] == [pays_for]
    assert not find_suspicions(groups, a, a)
    assert not find_suspicions(groups, b, [[0.0] * 8] * 12)  # a reward of nothing pays for nothing


def test_a_reward_with_a_constant_added_pays_for_nothing() -> None:
    draw = random.Random(0)
    a = [[float(draw.random() < 0.5) for _ in range(8)] for _ in range(28)]
    groups = [
        [sample("#### 1", num_tokens=int(20 + 10 * x) + draw.randrange(8)) for x in row]
        for row in a
    ]
    assert len({x + 0.1 - x for row in a for x in row}) > 1  # it rounds differently
    assert not find_suspicions(groups, a, [[x + 0.1 for x in row] for row in a])


def test_repeated_phrases_are_counted() -> None:
    assert repeated_share("a b c d e") == 0.0 and repeated_share("") == 0.0
    assert repeated_share("a b c d " * 10) > 0.8
