"""Ray Tune's searchers and schedulers, asked and told without a Ray cluster."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.backends.ray.tuning import (
    Halving,
    Population,
    Settings,
    Verdict,
    draws,
    make_searcher,
    require_packages,
)
from milescli.core.errors import MachineError
from milescli.recipe.sweep import Dimension

RATE = Dimension(key="train.optimizer.lr", kind="loguniform", low=1e-5, high=1e-2)
COUNT = Dimension(key="rollout.samples_per_prompt", kind="randint", low=2, high=5)
NAME = Dimension(key="train.algorithm", kind="choice", values=("grpo", "gspo"))
ALL = (RATE, COUNT, NAME)


@given(seed=st.integers(0, 2**31), trials=st.integers(1, 12))
def test_random_draws_are_within_their_ranges_and_equal_for_equal_seeds(
    seed: int, trials: int
) -> None:
    drawn = draws(ALL, kind="random", trials=trials, seed=seed)
    assert len(drawn) == trials and drawn == draws(ALL, kind="random", trials=trials, seed=seed)
    for settings in drawn:
        assert 0.99e-5 <= float(settings[RATE.key]) <= 1.01e-2
        assert settings[COUNT.key] in ("2", "3", "4") and settings[NAME.key] in NAME.values


def test_a_grid_has_every_combination_once() -> None:
    rates = Dimension(key="train.optimizer.lr", kind="grid", values=("1e-4", "1e-3", "1e-2"))
    drawn = draws((rates, NAME), kind="grid", trials=6, seed=0)
    assert {tuple(one.values()) for one in drawn} == {
        (rate, name) for rate in rates.values for name in NAME.values
    }


@pytest.mark.parametrize("kind", ["random", "optuna"])
def test_a_sweep_that_is_continued_keeps_its_trials_and_draws_others(kind: str) -> None:
    first = make_searcher(ALL, kind=kind, trials=6, seed=3, known=[])
    known = [first.ask(number) for number in (1, 2, 3)]
    second = make_searcher(ALL, kind=kind, trials=6, seed=3, known=known)
    again = [second.ask(number) for number in range(1, 7)]
    assert again[:3] == known
    assert len({one[RATE.key] for one in again}) == 6


def test_optuna_learns_from_results_and_passes_over_trials_without_one() -> None:
    searcher = make_searcher(ALL, kind="optuna", trials=40, seed=0, known=[])
    asked = list[Settings]()
    for number in range(1, 41):
        asked.append(searcher.ask(number))
        is_good = asked[-1][NAME.key] == "gspo"
        searcher.tell(number, None if number == 2 else 0.9 if is_good else 0.1)
    assert sum(one[NAME.key] == "gspo" for one in asked[20:]) >= 15


def test_halving_stops_what_is_worse_at_the_same_step_and_nothing_at_its_last() -> None:
    halving = Halving(max_steps=9, rung_steps=3, reduction=3)
    verdicts = {}
    for number, accuracy in enumerate((0.5, 0.1, 0.9), start=1):
        halving.add(number, {})
        assert halving.judge(number, step=0, accuracy=accuracy) is Verdict.GO_ON
        verdicts[number] = halving.judge(number, step=3, accuracy=accuracy)
        assert halving.judge(number, step=9, accuracy=0.0) is Verdict.GO_ON
    assert verdicts == {1: Verdict.GO_ON, 2: Verdict.STOP, 3: Verdict.GO_ON}


def population(*, trials: int = 4) -> Population:
    """One that exchanges at step 10 and 20 of 30."""
    made = Population(ALL, max_steps=30, rung_steps=10, seed=0)
    for number, settings in enumerate(draws(ALL, kind="random", trials=trials, seed=1), start=1):
        made.add(number, settings)
    return made


def test_the_worst_of_a_population_copies_the_best_when_all_are_there() -> None:
    trials = population()
    for number in (1, 2, 3, 4):
        assert trials.judge(number, step=5, accuracy=0.0) is Verdict.GO_ON
        assert not [*trials.exchanges()]
        assert trials.judge(number, step=10, accuracy=number / 10) is Verdict.PAUSE
    [exchange] = trials.exchanges()
    assert (exchange.number, exchange.donor) == (1, 4)
    assert set(exchange.settings) == {one.key for one in ALL}
    assert not [*trials.exchanges()]
    assert trials.next() in (1, 2, 3, 4)


def test_exchanged_numbers_stay_in_their_ranges() -> None:
    odd = Dimension(key="train.kl_coef", kind="uniform", low=1234.4, high=1234.6)
    assert {one[odd.key][:5] for one in draws([odd], kind="random", trials=9, seed=0)} == {"1234."}
    highest = {RATE.key: "0.01", COUNT.key: "4", NAME.key: "grpo"}
    for seed in range(20):
        trials = Population(ALL, max_steps=30, rung_steps=10, seed=seed)
        for number in (1, 2, 3, 4):
            trials.add(number, highest)
        for number in (1, 2, 3, 4):
            trials.judge(number, step=10, accuracy=number / 10)
        [exchange] = trials.exchanges()
        assert RATE.low <= float(exchange.settings[RATE.key]) <= RATE.high
        assert exchange.settings[COUNT.key] in ("2", "3", "4")


def test_a_population_goes_on_without_a_trial_that_ended() -> None:
    trials = population(trials=3)
    for number in (2, 3):
        assert trials.judge(number, step=10, accuracy=number / 10) is Verdict.PAUSE
    trials.end(1)
    assert trials.next() in (2, 3)
    assert [(one.number, one.donor) for one in trials.exchanges()] == [(2, 3)]


def test_a_population_that_is_continued_later_goes_on_to_its_end() -> None:
    trials = population(trials=3)
    trials.end(1)
    for number in (2, 3):
        assert trials.judge(number, step=20, accuracy=number / 10) is Verdict.PAUSE
    assert [(one.number, one.donor) for one in trials.exchanges()] == [(2, 3)]
    for _ in range(2):
        number = trials.next()
        assert number is not None
        trials.run(number)
        assert trials.judge(number, step=30, accuracy=0.5) is Verdict.GO_ON
        trials.end(number)
    assert trials.next() is None


@pytest.mark.parametrize(("module", "searcher"), [("ray.tune", "random"), ("optuna", "optuna")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, module: str, searcher: str
) -> None:
    require_packages(searcher)
    if module == "optuna":
        monkeypatch.setattr("milescli.backends.ray.tuning.find_spec", lambda _: None)
    else:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MachineError) as missing:
        require_packages(searcher)
    assert missing.value.fixes == ["pip install 'miles-cli[sweep]'"]
