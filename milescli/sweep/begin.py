"""The beginning of a sweep: draws and plans its trials, refuses what can be refused, and makes its
folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from milescli.backends.ray.tuning import make_searcher
from milescli.console.output import Output
from milescli.core.errors import MachineError
from milescli.platform.machine import Machine
from milescli.recipe.sweep import Sweep
from milescli.sweep.folder import create_sweep
from milescli.sweep.planning import PlannedTrial, TrialPlanner

FIRST_DRAWS = 10
"""Draws of optuna that do not depend on results."""


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
    planned = planner.plan_all([searcher.ask(number) for number in range(1, count + 1)])
    _refuse_shared_devices(sweep, planned)
    first = next(one for one in planned if one.loaded is not None and one.refusal is None)
    if checks_data:
        from milescli.runtime.dry_run import dry_run

        assert first.loaded is not None, "a trial that fits was loaded"
        dry_run(first.loaded, machine, output=output)
    return planned


def _refuse_shared_devices(sweep: Sweep, planned: list[PlannedTrial]) -> None:
    """Runs on one machine take the same devices, unless Ray assigns them."""
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


def begin_sweep(
    sweep: Sweep, planned: list[PlannedTrial], *, environ: Mapping[str, str], output: Output
) -> Path:
    """Create the folder of a sweep. Raises as `create_sweep`."""
    refused = [one for one in planned if one.refusal is not None]
    if refused:
        output.warn(f"{len(refused)} of {len(planned)} trials cannot run, and are left out")
    folder = create_sweep(sweep, environ=environ, cwd=Path.cwd(), home=Path.home())
    output.note(f"sweep directory {folder.shown}, {sweep.num_trials} trials")
    return folder.path
