"""Which settings matter: what is planted is found, by either method."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.recipe.sweep import Dimension
from milescli.sweep import importance
from milescli.sweep.importance import PED_ANOVA, RANKS, importance_of, rank_correlations

RATE = Dimension(key="lr", kind="loguniform", low=1e-5, high=1e-2)
NAME = Dimension(key="algorithm", kind="choice", values=("grpo", "gspo", "rloo"))
DIMENSIONS = (RATE, NAME)


def trials(num: int, seed: int) -> list[dict[str, str]]:
    """Settings at random."""
    draw = random.Random(seed)
    return [
        {"lr": f"{10 ** draw.uniform(-5, -2):.3g}", "algorithm": draw.choice(NAME.values)}
        for _ in range(num)
    ]


@pytest.mark.parametrize("method", [PED_ANOVA, RANKS])
@pytest.mark.parametrize("matters", ["lr", "algorithm"])
def test_the_setting_that_matters_is_first(
    monkeypatch: pytest.MonkeyPatch, method: str, matters: str
) -> None:
    if method == RANKS:
        monkeypatch.setattr(importance, "find_spec", lambda _: None)
    settings, noise = trials(40, seed=1), random.Random(2)
    good = {"grpo": 0.2, "gspo": 0.7, "rloo": 0.3}
    accuracies = [
        (float(one["lr"]) ** 0.3 if matters == "lr" else good[one["algorithm"]])
        + noise.gauss(0, 0.01)
        for one in settings
    ]
    found = importance_of(DIMENSIONS, settings, accuracies)
    assert found is not None and found.method == method and found.num_trials == 40
    assert next(iter(found.by_key)) == matters


def test_few_trials_or_equal_ones_rank_nothing() -> None:
    assert importance_of(DIMENSIONS, trials(3, 0), [0.1, 0.2, 0.3]) is None
    assert importance_of(DIMENSIONS, trials(8, 0), [0.5] * 8) is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12), st.integers(0, 99))
def test_rank_correlations_are_shares(accuracies: list[float], seed: int) -> None:
    found = rank_correlations(DIMENSIONS, trials(len(accuracies), seed), accuracies)
    assert all(-1e-9 <= value <= 1 + 1e-9 for value in found.values())
