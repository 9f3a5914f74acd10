"""The learning rate over a run."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Warmup
from milescli.recipe.train import Optimizer
from milescli.train.optimizers import lr_at, warmup_lr_at


def _curve(steps: int, **options: object) -> list[float]:
    optimizer = Optimizer(lr=1.0, **options)
    return [lr_at(optimizer, step, steps) for step in range(steps)]


def test_warm_up_rises_linearly_to_the_full_rate() -> None:
    assert _curve(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_as_in_transformers_and_the_last_step_still_learns() -> None:
    assert _curve(5, schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert _curve(4, schedule="linear", min_lr=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_rates_after_the_warm_up_are_those_of_transformers(name: str, warmup: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=1.0)
    theirs = transformers.get_scheduler(name, sgd, num_warmup_steps=warmup, num_training_steps=11)
    rates = []
    for _ in range(11):
        rates.append(sgd.param_groups[0]["lr"])
        sgd.step()
        theirs.step()
    assert _curve(11, schedule=name, warmup_steps=warmup)[warmup:] == pytest.approx(rates[warmup:])


def test_cosine_is_half_way_in_the_middle() -> None:
    curve = _curve(4, schedule="cosine", min_lr=0.0)
    assert curve == pytest.approx([1.0, 0.85355, 0.5, 0.14645], abs=1e-5)


@given(
    st.integers(1, 60),
    st.integers(0, 70),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0, 1),
)
def test_after_the_warm_up_it_never_rises_nor_leaves_its_bounds(
    steps: int, warmup: int, schedule: str, least: float
) -> None:
    curve = _curve(steps, warmup_steps=warmup, schedule=schedule, min_lr=least)
    assert all(0 < value <= 1 + 1e-12 for value in curve[: min(warmup, steps)])
    fall = curve[warmup:]
    assert all(one >= other - 1e-12 for one, other in pairwise(fall))
    assert all(least - 1e-12 <= value <= 1 + 1e-12 for value in fall)


def _warmup_curve(steps: int) -> list[float]:
    return [warmup_lr_at(Warmup(steps=steps, lr=1.0), step) for step in range(steps)]


@pytest.mark.parametrize(
    ("steps", "curve"),
    [
        (1, [1.0]),
        (2, [1.0, 0.1]),
        (3, [1.0, 1.0, 0.1]),
        (5, [1.0, 1.0, 1.0, 1.0, 0.1]),
        (6, [1.0, 1.0, 1.0, 1.0, 0.55, 0.1]),
        (20, [0.5, *[1.0] * 13, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1]),
    ],
)
def test_a_short_supervised_phase_rises_and_falls_too(steps: int, curve: list[float]) -> None:
    assert _warmup_curve(steps) == pytest.approx(curve)


@given(st.integers(2, 2000))
def test_the_supervised_phase_ends_at_a_tenth_whatever_its_length(steps: int) -> None:
    curve = _warmup_curve(steps)
    rise, fall = max(1, steps // 10), max(1, steps // 3)
    assert curve[-1] == pytest.approx(0.1, abs=1e-12 if fall < 100 else 0.0091)
    assert all(one < other for one, other in pairwise(curve[:rise]))
    assert set(curve[rise - 1 : -fall]) <= {1.0}
    assert all(one > other for one, other in pairwise(curve[-fall:]))


def test_the_supervised_phase_of_recorded_runs_is_the_same_bit_for_bit() -> None:
    expected = [4e-3 * (step + 1) / 40 for step in range(40)]
    expected += [4e-3 * (0.1 + 0.9 * min(1.0, (400 - step) / 133)) for step in range(40, 400)]
    warmup = Warmup(steps=400, lr=4e-3)
    assert [warmup_lr_at(warmup, step) for step in range(400)] == expected


def falling(*, progress: float, settings: Optimizer) -> float:
    """A schedule of the user's: below zero at the end."""
    return settings.lr * (1 - 2 * progress)


def test_a_schedule_of_the_user_is_asked_and_what_is_no_rate_is_named() -> None:
    mine = Optimizer(lr=1.0, schedule=f"{__name__}:falling", warmup_steps=2)
    assert [lr_at(mine, step, 12) for step in (0, 1, 2, 5)] == pytest.approx([0.5, 1, 1, 0.4])
    with pytest.raises(RecipeError, match=r"the schedule `.*:falling` returned -"):
        lr_at(mine, 11, 12)
    with pytest.raises(RecipeError, match="no schedule `cosin`") as refused:
        lr_at(Optimizer(schedule="cosin"), 0, 1)
    assert refused.value.fixes == ["--set train.optimizer.schedule=cosine"]
