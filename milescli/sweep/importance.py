"""Estimates how much each searched setting matters for the accuracy. With few trials this ranks
settings, and proves nothing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from milescli.recipe.sweep import Dimension

MIN_TRIALS = 4
"""Smallest number of trials with an accuracy; with fewer, nothing is ranked."""
RELIABLE_TRIALS = 30
"""PED-ANOVA ranked 25 of 25 simulated sweeps correctly with 30 trials, and 16 to 25 with 12; in
each, one setting mattered and one did not."""
BETTER_HALF = 0.5
"""PED-ANOVA compares this share of the trials, the best, with all. With optuna's default of a tenth
it ranked 15 of 25 correctly with 30 trials, if a choice of names mattered."""
PED_ANOVA, RANKS = "PED-ANOVA (optuna)", "rank correlation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Holds the importance of each setting."""

    method: str
    by_key: Mapping[str, float]
    """Searched key -> 0 to 1, the largest first. PED-ANOVA's add up to 1; rank correlations do
    not."""
    num_trials: int


def importance_of(
    dimensions: Sequence[Dimension],
    settings: Sequence[Mapping[str, str]],
    accuracies: Sequence[float],
) -> Importance | None:
    """Return the importance by PED-ANOVA (Watanabe et al. 2023, arXiv 2304.10255) if optuna is
    installed, else by rank correlation; None if there are too few trials, or all accuracies are
    equal. `settings`: of each trial with an accuracy."""
    if len(accuracies) < MIN_TRIALS or len(set(accuracies)) < 2:
        return None
    found, method = None, PED_ANOVA
    if find_spec("optuna") is not None:
        found = _ped_anova(dimensions, settings, accuracies)
    if found is None:
        found, method = rank_correlations(dimensions, settings, accuracies), RANKS
    by_key = dict(sorted(found.items(), key=lambda item: -item[1]))
    return Importance(method=method, by_key=by_key, num_trials=len(accuracies))


def _ped_anova(
    dimensions: Sequence[Dimension],
    settings: Sequence[Mapping[str, str]],
    accuracies: Sequence[float],
) -> dict[str, float] | None:
    """Compute PED-ANOVA's importances; None if optuna finds nothing in so few trials."""
    import optuna
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    spaces = dict[str, BaseDistribution]()
    for one in dimensions:
        if not one.is_range:
            spaces[one.key] = CategoricalDistribution(one.values)
        elif one.kind == "randint":
            spaces[one.key] = IntDistribution(int(one.low), int(one.high) - 1)
        else:
            spaces[one.key] = FloatDistribution(one.low, one.high, log=one.kind == "loguniform")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is experimental, by its own words
        for chosen, accuracy in zip(settings, accuracies, strict=True):
            params = {one.key: _value(one, chosen[one.key]) for one in dimensions}
            study.add_trial(
                optuna.create_trial(params=params, distributions=spaces, value=accuracy)
            )
        evaluator = PedAnovaImportanceEvaluator(target_quantile=BETTER_HALF)
        try:
            found = get_param_importances(study, evaluator=evaluator)
        except (ValueError, RuntimeError):
            return None
    return {one.key: float(found.get(one.key, 0.0)) for one in dimensions}


def _value(one: Dimension, text: str) -> str | int | float:
    if not one.is_range:
        return text
    return int(text) if one.kind == "randint" else min(max(float(text), one.low), one.high)


def rank_correlations(
    dimensions: Sequence[Dimension],
    settings: Sequence[Mapping[str, str]],
    accuracies: Sequence[float],
) -> dict[str, float]:
    """Return, by key, the absolute value of Spearman's correlation of a number with the accuracy.
    For a choice of names: the correlation ratio of the accuracies' ranks, the root of the share of
    their variance between the names."""
    ranks = _ranks(accuracies)
    found = dict[str, float]()
    for one in dimensions:
        texts = [chosen[one.key] for chosen in settings]
        try:
            places = _ranks([float(text) for text in texts])
        except ValueError:
            # a correlation with the mean of one's name is the correlation ratio
            means = {name: ranks[[name == text for text in texts]].mean() for name in set(texts)}
            places = np.asarray([means[text] for text in texts])
        varies = places.std() > 0 and ranks.std() > 0
        found[one.key] = abs(float(np.corrcoef(places, ranks)[0, 1])) if varies else 0.0
    return found


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Return [n] ranks from 0; equal values share the mean of theirs."""
    array = np.asarray(values, dtype=np.float64)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    return below + ((array[None, :] == array[:, None]).sum(axis=1) - 1) / 2
