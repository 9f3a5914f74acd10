"""Shows `miles launch --emit`: a job script on stdout, its assumptions on stderr."""

from __future__ import annotations

import sys
from pathlib import Path

from milescli.console.output import Output
from milescli.jobs.job import Job, machine_like_this
from milescli.jobs.script import Form, notes, script
from milescli.plan.types import Plan
from milescli.platform.machine import Machine
from milescli.recipe.load import LoadedRecipe
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.runtime.planning import plan_only, refuse_unproven


def show_job(
    loaded: LoadedRecipe, *, form: Form, machine: Machine | None, on: str | None, output: Output
) -> None:
    """Print the whole job script. `on` is the value of --on, and `machine` the nodes that it means;
    None means nodes like this one. Raises if a launch there would be refused."""
    if loaded.recipe.machine.address:
        output.warn("--address is ignored: the script starts its own Ray cluster")
    machine = machine or machine_like_this(loaded.recipe.machine)
    job = Job(
        loaded=loaded,
        plan=_plan(loaded, machine),
        machine=machine,
        folder=Path.cwd(),
        bin_dir=Path(sys.executable).parent,
        on=on,
    )
    text = script(job, form)
    output.json(
        "job", {"form": form, "script": text, "fingerprint": job.plan.fingerprint, "run": job.name}
    )
    output.text(text)
    for note in notes(job, form):
        output.note(note)


def _plan(loaded: LoadedRecipe, machine: Machine) -> Plan:
    facts = planned_facts(loaded.recipe)
    refuse_unproven(loaded.recipe, facts)
    return plan_only(loaded, machine, facts=facts)
