"""`miles launch --emit`: a job script on stdout, what it takes for granted on stderr."""

from __future__ import annotations

import sys
from pathlib import Path

from milescli.console.output import Output
from milescli.platform.machine import Machine
from milescli.recipe.load import LoadedRecipe
from milescli.runtime.emit import Form, job_of, notes, script


def show_job(
    loaded: LoadedRecipe, *, form: Form, machine: Machine | None, on: str | None, output: Output
) -> None:
    """Print it whole; `machine`: what --on says, or None for nodes like this one; `on`: its
    words."""
    if loaded.recipe.machine.address:
        output.warn(
            "--address is left out: the script starts a Ray cluster of its own, and names it"
        )
    job = job_of(
        loaded,
        machine=machine,
        folder=Path.cwd(),
        bin_dir=Path(sys.executable).parent,
        machine_words=on,
    )
    text = script(job, form)
    output.json(
        "job", {"form": form, "script": text, "fingerprint": job.plan.fingerprint, "run": job.name}
    )
    output.text(text)
    for note in notes(job, form):
        output.note(note)
