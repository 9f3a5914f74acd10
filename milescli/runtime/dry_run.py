"""Implements `miles launch --dry-run`: shows the plan of a run, and every refusal of a launch that
is known without starting it. Lists the checks that were not made."""

from __future__ import annotations

from collections.abc import Iterable

from milescli.console.output import Output
from milescli.core.errors import CheckpointError
from milescli.plan.types import Plan
from milescli.platform.machine import Machine
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.several import adapter_recipes
from milescli.runtime.inputs.checks import Outcome
from milescli.runtime.inputs.input_check_process import InputCheckProcess
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.runtime.inputs.quick_checks import run_quick_checks
from milescli.runtime.planning import plan_only, refuse_unproven


def dry_run(loaded: LoadedRecipe, machine: Machine | None, *, output: Output) -> Plan:
    """Return the plan of a run here, or on `machine`. Raises what a launch here would. For another
    machine, which may have other files and packages, that is a warning; so is a family that was
    not proven."""
    each = adapter_recipes(loaded)
    facts = planned_facts(loaded.recipe)
    first = list(run_quick_checks(loaded, each, facts=facts))
    _report(first, machine, output=output)
    # the data is read beside the planning
    is_here = not any(outcome.refusal for outcome in first)
    checks = (
        [InputCheckProcess(one.recipe, facts) for one in each.values() or [loaded]]
        if is_here
        else []
    )
    try:
        plan = plan_only(loaded, machine, facts=facts)
        found = [outcome for one in checks for outcome in one.outcomes()]
    finally:
        for one in checks:
            one.close()
    _report(found, machine, output=output)
    _show_outcomes([*first, *found], output=output)
    try:
        refuse_unproven(loaded.recipe, facts)
    except CheckpointError as error:
        output.warn(f"a launch would fail: {error.what}; {error.why}\n  fix: {error.fixes[0]}")
    return plan


def _report(made: Iterable[Outcome], machine: Machine | None, *, output: Output) -> None:
    """Warn of doubts, and of refusals if the run is for another machine; otherwise raise the first
    refusal."""
    for outcome in made:
        for doubt in outcome.doubts:
            output.warn(doubt)
        if outcome.refusal is None:
            continue
        if machine is None:
            raise outcome.refusal
        output.warn(f"on this computer it would fail: {outcome.refusal.what}")


def _show_outcomes(made: list[Outcome], *, output: Output) -> None:
    names = dict.fromkeys(one.name for one in made if not one.not_checked and not one.refusal)
    output.note(f"checked: {', '.join(names)}")
    unmade: dict[str, dict[str, None]] = {}
    for one in made:
        if one.not_checked:
            unmade.setdefault(one.not_checked, {})[one.name] = None
    for why, which in unmade.items():
        output.note(f"not checked: {', '.join(which)}: {why}")
