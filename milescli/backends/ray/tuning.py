"""Ray Tune's searchers and schedulers, called by the caller's own loop: `miles sweep` runs each
trial as a process of its own, so neither Tune's actors nor a Ray cluster are started. A searcher
draws settings and gets results. A scheduler gets each evaluation, and decides whether the trial
continues, stops, or pauses."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from milescli.core.errors import MachineError
from milescli.recipe.sweep import Dimension

METRIC, TIME = "accuracy", "step"
EXTRA = "sweep"
"""Extra of pyproject.toml with all packages that are needed here."""
Settings = Mapping[str, str]
"""Key of the recipe -> value, as `--set` takes it."""


class Verdict(StrEnum):
    """Names what happens to a trial after an evaluation."""

    GO_ON = "go on"
    STOP = "stop"
    PAUSE = "pause"


class Searcher:
    """Draws the settings of trials: those of a list, whatever the results."""

    def __init__(self, settings: Sequence[Settings]) -> None:
        self._settings = settings

    def ask(self, number: int) -> Settings:
        """Return the settings of trial `number`, from 1; each number is asked once, in order."""
        return self._settings[number - 1]

    def tell(self, number: int, accuracy: float | None) -> None:
        """Record the final accuracy of a trial; None: it has none."""


class Scheduler:
    """Decides whether running trials continue: lets each run to its end."""

    def add(self, number: int, settings: Settings) -> None:
        """Add a trial that will run."""

    def judge(self, number: int, *, step: int, accuracy: float) -> Verdict:
        """Record an evaluation of a trial, and decide about the trial."""
        return Verdict.GO_ON

    def end(self, number: int) -> None:
        """Record that a trial has ended, for any reason."""


def require_packages(searcher: str) -> None:
    """Raise MachineError if Ray Tune, or what the searcher needs, is not installed."""
    try:
        import ray.tune  # noqa: F401
    except ImportError as error:
        raise _missing("Ray Tune", str(error)) from None
    if searcher == "optuna" and find_spec("optuna") is None:
        raise _missing("`searcher: optuna`", "the package `optuna` is not installed")


def _missing(who: str, why: str) -> MachineError:
    return MachineError(
        f"{who} needs packages that are not installed",
        why=" ".join(why.split()),
        fix=f"pip install 'miles-cli[{EXTRA}]'",
    )


def make_searcher(
    dimensions: Sequence[Dimension], *, kind: str, trials: int, seed: int, known: Sequence[Settings]
) -> Searcher:
    """Return a searcher whose first draws are `known`, those of a sweep that is continued."""
    if kind == "optuna":
        return _Optuna(dimensions, seed=seed, known=known)
    return Searcher([*known, *draws(dimensions, kind=kind, trials=trials, seed=seed)[len(known) :]])


def draws(dimensions: Sequence[Dimension], *, kind: str, trials: int, seed: int) -> list[Settings]:
    """Return the settings of all trials of a grid, or of `trials` random ones. Equal arguments give
    equal settings."""
    import numpy as np
    from ray import tune
    from ray.tune.search.variant_generator import generate_variants

    is_grid = kind == "grid"
    space = {
        str(place): tune.grid_search(list(one.values)) if is_grid else _domain(one)
        for place, one in enumerate(dimensions)
    }
    state = np.random.RandomState(seed)
    found = [
        _to_set_values(
            dimensions, {one.key: variant[str(place)] for place, one in enumerate(dimensions)}
        )
        for _ in range(1 if is_grid else trials)
        for _, variant in generate_variants(space, random_state=state)
    ]
    assert len(found) == trials, (len(found), trials)
    return found


def _domain(one: Dimension) -> Any:
    from ray import tune

    if not one.is_range:
        return tune.choice(list(one.values))
    if one.kind == "randint":
        return tune.randint(int(one.low), int(one.high))
    return getattr(tune, one.kind)(one.low, one.high)


def _to_set_values(dimensions: Sequence[Dimension], drawn: Mapping[str, Any]) -> Settings:
    """Return draws as `--set` takes them; numbers have three digits, so that the run has the value
    that is shown."""
    return {
        one.key: str(drawn[one.key])
        if not one.is_range
        else str(int(drawn[one.key]))
        if one.kind == "randint"
        else _rounded(one, float(drawn[one.key]))
        for one in dimensions
    }


def _rounded(one: Dimension, value: float) -> str:
    """Return the number with three digits; with all, if it would leave the range."""
    text = f"{value:.3g}"
    return text if one.low <= float(text) <= one.high else str(value)


def _from_set_values(dimensions: Sequence[Dimension], settings: Settings) -> dict[str, Any]:
    """Invert `_to_set_values`; rounded numbers stay within their range."""
    return {one.key: _within_range(one, settings[one.key]) for one in dimensions}


def _within_range(one: Dimension, value: Any) -> Any:
    """Return the value of a dimension; for a range, the nearest number in it."""
    if not one.is_range:
        return value
    if one.kind == "randint":
        return min(max(int(value), int(one.low)), int(one.high) - 1)
    return min(max(float(value), one.low), one.high)


class _Optuna(Searcher):
    """Uses Tune's OptunaSearch: a tree-structured Parzen estimator. Its first ten draws are
    random."""

    def __init__(
        self, dimensions: Sequence[Dimension], *, seed: int, known: Sequence[Settings]
    ) -> None:
        from numpy.random import SeedSequence
        from ray.tune.search.optuna import OptunaSearch

        logging.getLogger("optuna").setLevel(logging.WARNING)
        self._dimensions = dimensions
        domains = {one.key: _domain(one) for one in dimensions}
        self._search = OptunaSearch(
            space=OptunaSearch.convert_search_space(domains),
            metric=METRIC,
            mode="max",
            # the same seed again would draw what the first attempt has drawn
            seed=int(SeedSequence([seed, len(known)]).generate_state(1)[0]),
            points_to_evaluate=[_from_set_values(dimensions, one) for one in known] or None,
        )

    def ask(self, number: int) -> Settings:
        return _to_set_values(self._dimensions, self._search.suggest(str(number)))

    def tell(self, number: int, accuracy: float | None) -> None:
        result = None if accuracy is None else {METRIC: accuracy, TIME: 1}
        self._search.on_trial_complete(str(number), result=result, error=result is None)


class Halving(Scheduler):
    """Implements ASHA, asynchronous successive halving (Li et al. 2018, arXiv 1810.05934): at steps
    rung_steps, rung_steps x reduction, ..., a trial stops unless it is among the best 1 / reduction
    of those that reached that step before."""

    def __init__(self, *, max_steps: int, rung_steps: int, reduction: int) -> None:
        from ray.tune.schedulers import ASHAScheduler

        self._scheduler = ASHAScheduler(
            time_attr=TIME,
            metric=METRIC,
            mode="max",
            max_t=max_steps,
            grace_period=min(rung_steps, max_steps),
            reduction_factor=reduction,
        )
        self._max_steps = max_steps

    def add(self, number: int, settings: Settings) -> None:
        """Add a trial that will run."""
        self._scheduler.on_trial_add(None, SimpleNamespace(trial_id=str(number)))

    def judge(self, number: int, *, step: int, accuracy: float) -> Verdict:
        """Stop the trial if it is worse than others were; a trial's last step stops nothing."""
        if step >= self._max_steps:
            return Verdict.GO_ON
        trial = SimpleNamespace(trial_id=str(number))
        said = self._scheduler.on_trial_result(None, trial, {TIME: step, METRIC: accuracy})
        return Verdict.STOP if said == self._scheduler.STOP else Verdict.GO_ON


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Describes a trial that continues from the checkpoint of a better one, with changed
    settings."""

    number: int
    donor: int
    settings: Settings


class Population(Scheduler):
    """Implements population-based training (Jaderberg et al. 2017, arXiv 1711.09846, appendix A.1):
    every `rung_steps` all trials wait for each other; then the worst quarter copies the best
    quarter.

    Tune's scheduler works on Tune's own trials and their controller; `_Member` and `_Members` have
    the attributes that it reads."""

    def __init__(
        self, dimensions: Sequence[Dimension], *, max_steps: int, rung_steps: int, seed: int
    ) -> None:
        from ray.tune.schedulers import PopulationBasedTraining

        random.seed(seed)  # the scheduler has no generator of its own
        logging.getLogger("ray.tune.schedulers.pbt").setLevel(logging.ERROR)
        self._dimensions, self._max_steps = dimensions, max_steps
        self._rung_steps = rung_steps
        self._members = _Members()
        self._scheduler = PopulationBasedTraining(
            time_attr=TIME,
            metric=METRIC,
            mode="max",
            perturbation_interval=rung_steps,
            hyperparam_mutations={
                one.key: _domain(one) if one.is_range else list(one.values) for one in dimensions
            },
            log_config=False,
            synch=True,
        )

    def add(self, number: int, settings: Settings) -> None:
        """Add a trial that will run."""
        member = _Member(number, _from_set_values(self._dimensions, settings))
        self._members.by_number[number] = member
        self._scheduler.on_trial_add(self._members, member)

    def judge(self, number: int, *, step: int, accuracy: float) -> Verdict:
        """Pause it at an exchange. See `exchanges`."""
        if step >= self._max_steps:
            return Verdict.GO_ON
        member = self._members.by_number[number]
        member.last_result = {TIME: step, METRIC: accuracy}
        # a population that is continued begins at a later exchange than Tune's count of them
        if step >= self._scheduler._next_perturbation_sync + self._rung_steps:
            self._scheduler._next_perturbation_sync = step
        said = self._scheduler.on_trial_result(self._members, member, member.last_result)
        if said == self._scheduler.CONTINUE:
            return Verdict.GO_ON
        member.status = "PAUSED"
        return Verdict.PAUSE

    def exchanges(self) -> Iterator[Exchange]:
        """Yield the exchanges that were decided since the last call."""
        for member in self._members.by_number.values():
            if (donor := member.taken_from) is not None:
                member.taken_from = None
                # Tune multiplies numbers, and exchange after exchange would leave the ranges
                for one in self._dimensions:
                    member.config[one.key] = _within_range(one, member.config[one.key])
                settings = _to_set_values(self._dimensions, member.config)
                yield Exchange(number=member.number, donor=donor, settings=settings)

    def end(self, number: int) -> None:
        """Remove a trial from the population. Trials that waited only for it exchange without
        it."""
        self._members.by_number[number].status = "TERMINATED"

    def next(self) -> int | None:
        """Return a paused trial that may continue; None while other trials must be waited for."""
        member = self._scheduler.choose_trial_to_run(self._members)
        if member is None and (waiting := self._members.waiting()):
            # the one that they waited for has ended instead
            last = max(waiting, key=lambda one: one.last_result[TIME])
            last.status = "RUNNING"
            self._scheduler.on_trial_result(self._members, last, last.last_result)
            last.status = "PAUSED"
            member = self._scheduler.choose_trial_to_run(self._members) or min(
                waiting, key=lambda one: one.last_result[TIME]
            )
        return member.number if member is not None else None

    def run(self, number: int) -> None:
        """Record that a paused trial continues."""
        self._members.by_number[number].status = "RUNNING"


class _Member:
    """Has the attributes of a trial that Tune's PopulationBasedTraining reads."""

    def __init__(self, number: int, config: dict[str, Any]) -> None:
        self.number, self.trial_id, self.config = number, str(number), config
        self.experiment_tag, self.status = str(number), "RUNNING"
        self.last_result: dict[str, Any] = {}
        self.evaluated_params: dict[str, Any] = {}
        self.checkpoint = SimpleNamespace(number=number)
        self.temporary_state = SimpleNamespace(saving_to=None)
        self.run_metadata = SimpleNamespace(checkpoint_manager=_Checkpoints(self))
        self.taken_from: int | None = None

    def is_finished(self) -> bool:
        return self.status == "TERMINATED"

    def set_experiment_tag(self, tag: str) -> None:
        self.experiment_tag = tag

    def set_config(self, config: dict[str, Any]) -> None:
        self.config = config


class _Checkpoints:
    """A trial's checkpoint manager, which an exchange gives the donor's checkpoint."""

    checkpoint_config = SimpleNamespace(num_to_keep=None)

    def __init__(self, member: _Member) -> None:
        self.__dict__["member"] = member

    def __setattr__(self, name: str, value: Any) -> None:
        assert name == "_latest_checkpoint_result", name
        self.__dict__["member"].taken_from = value.checkpoint.number


class _Members:
    """Has the methods of a controller that Tune's PopulationBasedTraining calls."""

    search_alg = None

    def __init__(self) -> None:
        self.by_number: dict[int, _Member] = {}

    def get_trials(self) -> list[_Member]:
        return list(self.by_number.values())

    def get_live_trials(self) -> list[_Member]:
        return [one for one in self.by_number.values() if not one.is_finished()]

    def waiting(self) -> list[_Member]:
        return [one for one in self.by_number.values() if one.status == "PAUSED"]

    def pause_trial(self, trial: _Member, should_checkpoint: bool) -> None:
        trial.status = "PAUSED"

    def _schedule_trial_save(self, trial: _Member, result: object) -> Any:
        return trial.checkpoint
