"""Jobs for machines that are only named, for the tests of this room."""

from __future__ import annotations

from pathlib import Path

from milescli.jobs.job import Job
from milescli.plan.make import make_plan
from milescli.platform.machine import read_machine
from milescli.recipe.load import load
from milescli.runtime.inputs.model_facts import facts_of_recipe


def job(
    *sets: str,
    recipe: str = "quickstart",
    machine: str = "2x8xH200",
    environ: dict[str, str] | None = None,
    folder: Path = Path("/shared/my work"),
    bin_dir: Path = Path("/opt/a b/bin"),
    **flags: str,
) -> Job:
    """Flags as `machine__gpus="--gpus 4"`."""
    named = read_machine(machine)
    all_flags = {
        "machine.nodes": f"--nodes {len(named.nodes)}",
        **{key.replace("__", "."): text for key, text in flags.items()},
    }
    loaded = load(
        recipe,
        sets=sets,
        flags=all_flags,
        environ=environ or {},
        cwd=Path.cwd(),
        home=Path("/nowhere"),
    )
    plan = make_plan(loaded.recipe, named, facts_of_recipe(loaded.recipe.model))
    return Job(loaded=loaded, plan=plan, machine=named, folder=folder, bin_dir=bin_dir)
