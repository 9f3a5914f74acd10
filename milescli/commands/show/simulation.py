"""Shows `miles simulate`: its candidates as a table, the recommended one with its reason and a
picture of its last steps, the assumptions, and the next command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from milescli.checkpoint.run_dir import open_run
from milescli.cluster.nodes import planning_machine
from milescli.commands.find_run import find_run
from milescli.commands.options import recipe_environment
from milescli.console.output import Output
from milescli.console.theme import sparkline
from milescli.core.units import format_count, format_duration
from milescli.platform.machine import Machine
from milescli.recipe.load import LoadedRecipe, load
from milescli.recipe.schema import Recipe
from milescli.runtime.inputs.auxiliary_models import teacher_facts
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.runtime.planning import plan_only
from milescli.simulate.assumptions import assumptions, find_warnings
from milescli.simulate.candidates import Candidate, Comparison, reason, with_measured
from milescli.simulate.measured import read_measured

WIDTH = 72
"""Number of characters of the picture."""
PICTURED = 4
"""Number of steps in the picture, the last ones."""
MARKS = {"train": "█", "wait": "·", "publish": "▒", "replaced": "x"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Holds what the command line says."""

    loaded: LoadedRecipe
    sets: Sequence[str]
    flags: Mapping[str, str]
    machine: Machine | None
    """None: this machine."""
    run: str | None
    assume: Sequence[str]
    price: float | None
    window: int | None
    seed: int

    def varied(self, further: Sequence[str]) -> Recipe:
        """Return the recipe with additional settings. Raises RecipeError."""
        sets = [*self.sets, *further]
        return load(self.loaded.source, sets=sets, flags=self.flags, **recipe_environment()).recipe  # type: ignore[arg-type]


def show_simulation(options: SimulationOptions, *, output: Output) -> None:
    """Simulate the recipe, and show the results. Raises what planning the recipe raises."""
    recipe = options.loaded.recipe
    assume = assumptions(recipe, options.assume)
    measured = None
    if options.run is not None:
        measured = read_measured(open_run(find_run(options.run)))
        assume = with_measured(assume, measured, recipe)
    for doubt in find_warnings(recipe, assume):
        output.warn(doubt)
    if measured is not None and measured.plan.device_kind == "cpu":
        output.warn(
            "a CPU's engines and trainer share its cores, but are simulated as if each had its "
            "own: asynchronous settings gain less here"
        )
    facts = planned_facts(recipe)
    machine = options.machine or planning_machine(options.loaded)
    plan_only(options.loaded, machine, facts=facts)
    made = Comparison(
        vary=options.varied,
        machine=machine,
        facts=facts,
        assume=assume,
        measured=measured,
        teachers=teacher_facts(recipe),
        steps=options.window,
        seed=options.seed,
    )
    best = made.run()
    others = sorted(made.candidates, key=lambda one: -one.outcome.samples_per_s)
    command = _command(best, options)
    output.json("simulation", _payload(made, best, command, price=options.price))
    output.table(
        _columns(options.price),
        [_row(one, best, options.price) for one in others],
        title=f"{recipe.name}, {recipe.train.steps} steps of "
        f"{recipe.rollout.prompts_per_step} x {recipe.rollout.samples_per_prompt} samples",
    )
    output.blank()
    output.kv(
        {"recommended": f"{best.layout.name}, {best.rollout}", "because": reason(best, others)}
    )
    output.blank()
    output.kv(picture(best), title=_legend(best))
    output.blank()
    assumed = [(name, f"{value:.6g}", origin) for name, value, origin in made.assume.rows()]
    output.table(["assumed", "value", "from"], assumed)
    output.blank()
    for name, why in made.skipped.items():
        output.note(f"not simulated: {name}: {why}")
    output.note("simulated, not measured; nothing was started")
    output.next_steps({command: "run the recommended candidate"})


def _columns(price: float | None) -> list[str]:
    names = ["engines + trainer", "rollout", "samples/s", "tokens/s", "step"]
    names += ["engines idle", "trainer waits", "staleness", "max", "whole run"]
    return [*names, *(["cost"] if price is not None else []), ""]


def _row(one: Candidate, best: Candidate, price: float | None) -> list[object]:
    outcome = one.outcome
    cost = [] if price is None else [f"{one.gpu_hours * price:,.0f}"]
    return [
        one.layout.name,
        one.rollout,
        float(f"{outcome.samples_per_s:.3g}"),
        format_count(outcome.tokens_per_s),
        format_duration(outcome.step_s),
        f"{outcome.engines_idle:.0%}",
        f"{outcome.trainer_wait:.0%}",
        round(outcome.staleness_mean, 1),
        outcome.staleness_max,
        format_duration(3600 * one.hours),
        *cost,
        "recommended" if one is best else "",
    ]


def _payload(
    made: Comparison, best: Candidate, command: str, *, price: float | None
) -> dict[str, object]:
    def of(one: Candidate) -> dict[str, object]:
        cost = {} if price is None else {"cost": round(one.gpu_hours * price, 2)}
        return {
            "layout": one.layout.name,
            "engine_devices": one.layout.engine_devices,
            "trainer_devices": one.layout.trainer_devices,
            "sets": list(one.sets),
            **asdict(one.outcome),
            "hours": one.hours,
            "gpu_hours": one.gpu_hours,
            **cost,
        }

    return {
        "candidates": [of(one) for one in made.candidates],
        "recommended": made.candidates.index(best),
        "reason": reason(best, made.candidates),
        "command": command,
        "skipped": made.skipped,
        "assumptions": [
            {"name": name, "value": value, "from": origin}
            for name, value, origin in made.assume.rows()
        ],
    }


def _command(best: Candidate, options: SimulationOptions) -> str:
    sets = dict(text.partition("=")[::2] for text in (*options.sets, *best.sets))
    words = ["miles", "launch", "--recipe", options.loaded.source]
    words += ["--nodes", str(len(options.machine.nodes))] if options.machine else []
    for key, value in sets.items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)


def _window(best: Candidate) -> tuple[float, float]:
    ends = best.simulation.published_s
    return ends[max(0, len(ends) - PICTURED - 1)], ends[-1]


def _legend(best: Candidate) -> str:
    begin, end = _window(best)
    return (
        f"its last {PICTURED} steps, {format_duration(end - begin)} "
        f"({MARKS['train']} trains, {MARKS['wait']} waits, {MARKS['publish']} publishes)"
    )


def picture(best: Candidate) -> dict[str, object]:
    """Draw the last steps: the share of engines that work, and what the trainer does most, in each
    of WIDTH equal intervals."""
    begin, end = _window(best)
    part = (end - begin) / WIDTH
    busy, at, num = [0.0] * WIDTH, 0.0, 0
    for moment, more in [*best.simulation.fleet.changes, (end, 0)]:
        _add(busy, num, at - begin, min(moment, end) - begin, part=part)
        at, num = moment, num + more
    shares = [seconds / part / best.layout.speeds.num_engines for seconds in busy]
    spent = {what: [0.0] * WIDTH for what in MARKS}
    for span in best.simulation.spans:
        _add(spent[span.what], 1, span.begin_s - begin, span.end_s - begin, part=part)
    trainer = "".join(
        MARKS[max(spent, key=lambda what: spent[what][place])] for place in range(WIDTH)
    )
    return {"engines": sparkline(shares, WIDTH, low=0.0, high=1.0), "trainer": trainer}


def _add(parts: list[float], number: float, begin: float, end: float, *, part: float) -> None:
    """Add, to each interval of the picture, `number` times its seconds between begin and end."""
    first, last = max(0, int(begin // part)), min(len(parts), math.ceil(end / part))
    for place in range(first, last):
        parts[place] += number * max(0.0, min(end, (place + 1) * part) - max(begin, place * part))
