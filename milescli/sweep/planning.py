"""Plans what each trial of a sweep would run, or says why it cannot run: its recipe and its plan.
Starts nothing, and imports no torch, so that the process that drives a sweep stays small."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from milescli.backends.ray.tuning import Halving, Population, Scheduler, make_searcher
from milescli.cluster.nodes import planning_machine
from milescli.console.output import Output
from milescli.core.errors import MachineError, MilesError
from milescli.plan.types import Plan
from milescli.platform.machine import Machine
from milescli.recipe.load import LoadedRecipe, load
from milescli.recipe.section import Rule, refuse
from milescli.recipe.sweep import Sweep
from milescli.runtime import fork
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.runtime.planning import plan_without_plugins, refuse_unproven
from milescli.runtime.recording.run_records import is_below

Settings = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrial:
    """Describes one trial before it starts."""

    number: int
    settings: Settings
    loaded: LoadedRecipe | None = None
    plan: Plan | None = None
    refusal: MilesError | None = None
    """Why it cannot run."""

    @property
    def memory_bytes(self) -> int | None:
        """Return the planned memory: of the fullest device, or on a CPU of all processes."""
        if self.plan is None:
            return None
        if (forecast := self.plan.forecast) is not None:
            return max(
                sum(part.size_bytes for part in parts if part.name != "margin")
                for parts in (forecast.training, forecast.rollout)
            )
        return sum(max(one.phases.values(), default=0) for one in self.plan.processes) or None

    @property
    def gpu_hours(self) -> float | None:
        """Return the predicted GPU-hours; None on a CPU, where no time is predicted."""
        forecast = self.plan.forecast if self.plan is not None else None
        return forecast.gpu_hours if forecast is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlanner:
    """Plans the trials of one sweep."""

    sweep: Sweep
    recipe: str
    """Name or path of the recipe."""
    cwd: Path
    machine: Machine | None = None
    """Machine to plan for; None: this computer, or the recipe's cluster."""

    def words(self, settings: Settings) -> list[str]:
        """Return all changes of a trial to the recipe, each as KEY=VALUE."""
        return [*self.sweep.fixed, *(f"{key}={value}" for key, value in settings.items())]

    def load(self, settings: Settings, *, name: str | None) -> LoadedRecipe:
        """Return the recipe of a trial. Raises RecipeError."""
        return load(
            self.recipe,
            sets=self.words(settings),
            flags={} if name is None else {"run.name": f"--name {name}"},
            environ=dict(os.environ),
            cwd=self.cwd,
            home=Path.home(),
        )

    def plan(self, number: int, settings: Settings) -> PlannedTrial:
        """Return what a trial would run, or why it cannot."""
        loaded = None
        try:
            loaded = self.load(settings, name=f"{self.sweep.name}-{number}")
            plan = _plan(loaded, self.machine)
        except MilesError as error:
            return PlannedTrial(number=number, settings=settings, loaded=loaded, refusal=error)
        return PlannedTrial(number=number, settings=settings, loaded=loaded, plan=plan)

    @contextmanager
    def shared_processes(self, settings: Settings) -> Iterator[Mapping[str, str]]:
        """Start the processes that trials with these settings share (on a CPU, one from which their
        engines are forked), and end them afterwards. Yields the environment variables that name
        them."""
        from milescli.runtime.prestart import lend_engines

        loaded = self.load(settings, name=None)
        plan, facts = _plan(loaded, self.machine), planned_facts(loaded.recipe)
        with lend_engines(loaded.recipe, plan, facts) as variables:
            yield variables


def _plan(loaded: LoadedRecipe, machine: Machine | None) -> Plan:
    facts = planned_facts(loaded.recipe)
    refuse_unproven(loaded.recipe, facts)
    return plan_without_plugins(loaded, machine or planning_machine(loaded), facts=facts)


def require_objective(loaded: LoadedRecipe, sweep: Sweep) -> None:
    """Raise RecipeError if trials have no held-out accuracy, or have none at the steps at which the
    scheduler needs it."""
    recipe, scheduler, name = loaded.recipe, sweep.settings.scheduler, sweep.settings.recipe
    schedules, rung = scheduler != "none", rung_steps(loaded, sweep)
    fixed = next((one.key for one in sweep.dimensions if not _may_fork(one.key)), "")
    refuse(
        [
            Rule(
                recipe.data.eval is None,
                f"the recipe `{name}` has no held-out prompts",
                why="a sweep compares trials by their accuracy on `data.eval`, which is not set",
                fix="write `set: {data.eval: test.jsonl}` into the sweep file",
            ),
            Rule(
                recipe.adapters,
                f"the recipe `{name}` trains several adapters",
                why="a trial of a sweep has one model, and one accuracy",
                fix="remove `adapters` from the recipe",
            ),
            Rule(
                schedules and not recipe.eval.every,
                f"`scheduler: {scheduler}` has nothing to compare",
                why="`eval.every` is 0, so trials are evaluated only at their start and end",
                fix="write `set: {eval.every: 10}` into the sweep file",
            ),
            Rule(
                schedules and recipe.train.epochs is not None,
                f"`scheduler: {scheduler}` needs the number of steps",
                why="`train.epochs` is set, so the number of steps is known when a trial starts",
                fix="write `set: {train.epochs: null, train.steps: N}` into the sweep file",
            ),
            Rule(
                schedules and rung >= recipe.train.steps,
                f"`scheduler: {scheduler}` would never act",
                why=f"it first compares at step {rung} of {recipe.train.steps}",
                fix=f"write `rung_steps: {max(1, recipe.train.steps // 3)}` into the sweep file, "
                "and `eval.every` not above it",
            ),
            Rule(
                scheduler == "pbt" and fixed,
                f"`scheduler: pbt` cannot change `{fixed}`",
                why="a population changes settings of trials that have begun, as `miles fork` "
                "does, and the checkpoint was made with this one",
                fix="write `scheduler: asha`   # or do not search this key",
            ),
        ]
    )


def _may_fork(key: str) -> bool:
    return is_below(key, fork.MAY_CHANGE) and not is_below(key, fork.MUST_STAY)


def rung_steps(loaded: LoadedRecipe, sweep: Sweep) -> int:
    """Return the step of the scheduler's first comparison."""
    return sweep.settings.rung_steps or loaded.recipe.eval.every


def make_scheduler(loaded: LoadedRecipe, sweep: Sweep) -> Scheduler:
    """Return the scheduler of a sweep. `loaded`: the recipe of any of its trials."""
    kind, steps = sweep.settings.scheduler, loaded.recipe.train.steps
    if kind == "none":
        return Scheduler()
    rung = rung_steps(loaded, sweep)
    if kind == "asha":
        return Halving(max_steps=steps, rung_steps=rung, reduction=sweep.settings.reduction)
    return Population(sweep.dimensions, max_steps=steps, rung_steps=rung, seed=sweep.settings.seed)


FIRST_DRAWS = 10
"""Number of draws of optuna that do not depend on results."""


def planned_trials(
    sweep: Sweep, *, cwd: Path, machine: Machine | None, checks_data: bool, output: Output
) -> list[PlannedTrial]:
    """Return the trials that can be known before any has run, planned for a machine; None: for this
    one. `checks_data`: read the data of the first trial, too, as `miles launch --dry-run` does.
    Raises MilesError if trials cannot be compared, or if none can run."""
    count = sweep.num_trials
    if sweep.settings.searcher == "optuna":
        count = min(count, FIRST_DRAWS)
    searcher = make_searcher(
        sweep.dimensions,
        kind=sweep.settings.searcher,
        trials=sweep.num_trials,
        seed=sweep.settings.seed,
        known=[],
    )
    planner = TrialPlanner(sweep=sweep, recipe=sweep.settings.recipe, cwd=cwd, machine=machine)
    planned = [planner.plan(number, searcher.ask(number)) for number in range(1, count + 1)]
    loaded = next((one.loaded for one in planned if one.loaded is not None), None)
    if loaded is not None:
        require_objective(loaded, sweep)
    if all(one.refusal is not None for one in planned):
        raise planned[0].refusal or AssertionError
    _refuse_shared_devices(sweep, planned)
    if checks_data:
        from milescli.runtime.dry_run import dry_run

        fitting = next(one.loaded for one in planned if one.plan is not None)
        assert fitting is not None, "a trial that has a plan was loaded"
        dry_run(fitting, machine, output=output)
    return planned


def _refuse_shared_devices(sweep: Sweep, planned: list[PlannedTrial]) -> None:
    """Raise MachineError if several trials would run at once on the same devices: only Ray gives
    each its own."""
    for one in planned:
        if one.plan is None or one.loaded is None or sweep.settings.at_once == 1:
            continue
        machine = one.loaded.recipe.machine
        if one.plan.device_kind != "cpu" and machine.address is None:
            raise MachineError(
                f"{sweep.settings.at_once} trials at once would use the same "
                f"{len(one.plan.slots)} devices",
                why="runs that are not on one Ray cluster do not know of each other",
                fix=[
                    "write `at_once: 1` into the sweep file",
                    "ray start --head --port=6379   # then write `set: {machine.address: "
                    "127.0.0.1:6379, machine.gpus: N}`, the GPUs of one trial",
                ],
            )
