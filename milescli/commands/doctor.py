"""`miles doctor`: is this machine ready. `miles version`: what is installed."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib import metadata
from typing import Annotated

import typer

from milescli import __version__
from milescli.commands.options import OptionalRecipeOption, SetOption, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles doctor",
    "miles doctor --recipe quickstart",
    "miles doctor --address 10.0.0.1:6379 --recipe my.yaml",
    "miles doctor --json",
]

PACKAGES = ("torch", "ray", "sglang", "megatron-core", "transformers", "transformer-engine")
"""What `miles version` names beside its own version."""

AddressOption = Annotated[
    str | None,
    typer.Option("--address", help="Also check every node of this Ray cluster (machine.address)."),
]


@verb("doctor", examples=EXAMPLES)
def doctor(
    context: typer.Context,
    *,
    recipe: OptionalRecipeOption = None,
    sets: SetOption = None,
    address: AddressOption = None,
) -> None:
    """Check this machine, or every node of a Ray cluster; each finding comes with the command that
    fixes it. Exits with 4 if a check fails."""
    from milescli.doctor.fixes import DoctorOptions
    from milescli.doctor.run import run_doctor

    if sets and recipe is None:
        raise typer.BadParameter("--set changes a recipe, so name one with --recipe")
    output: Output = context.obj
    options = DoctorOptions(recipe=recipe, sets=sets or [], address=address)
    raise typer.Exit(run_doctor(options, output=output))


@verb("version", examples=["miles version", "miles version --json"])
def version(context: typer.Context) -> None:
    """Print the versions of miles, Python and the installed engines."""
    output: Output = context.obj
    found = {"miles": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found["platform"] = platform.platform()
    output.json("version", {"version": __version__, "versions": found})
    output.kv(found)
