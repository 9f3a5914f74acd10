"""Makes a job script: a form of templates/jobs, filled in for SLURM, KubeRay or plain ssh. Called
by `miles launch --emit`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from typing import Literal

from milescli import __version__
from milescli.jobs.job import Job
from milescli.jobs.kuberay import kuberay_values
from milescli.jobs.shared_folder import shared_folder_values, slurm_values
from milescli.recipe.data_files import FIELDS, files_of
from milescli.recipe.schema import Recipe
from milescli.recipe.templates import templates_dir

Form = Literal["slurm", "kuberay", "ssh"]
FORMS: dict[Form, tuple[str, Callable[[Job], dict[str, str]]]] = {
    "slurm": ("slurm.sh", slurm_values),
    "kuberay": ("kuberay.yaml", kuberay_values),
    "ssh": ("ssh.sh", shared_folder_values),
}
"""Form -> its file in templates/jobs, and what gives the values of its places."""

_PLACEHOLDER = re.compile(r"@([a-z_]+)@")


def script(job: Job, form: Form) -> str:
    """Return the whole script, ready for `sbatch`, `kubectl apply` or `bash`."""
    template, values_of = FORMS[form]
    on = ["--on", job.on] if job.on else []
    made_by = shlex.join([*job.launch(recipe=job.loaded.source), *on, "--emit", form])
    common = {
        "title": _one_line(
            f"{job.loaded.recipe.name}: {job.size}; plan {job.plan.fingerprint}, miles "
            f"{__version__}"
        ),
        "made_by": _one_line(made_by),
    }
    text = (templates_dir() / "jobs" / template).read_text(encoding="utf-8")
    return fill(text, {**common, **values_of(job)})


def fill(form: str, values: dict[str, str]) -> str:
    """Replace each `@name@` by its value. A name without a value, or a value without a placeholder,
    is our own mistake."""
    names = set(_PLACEHOLDER.findall(form))
    assert names == set(values), (sorted(names - set(values)), sorted(set(values) - names))
    return _PLACEHOLDER.sub(lambda place: values[place[1]], form)


def notes(job: Job, form: Form) -> list[str]:
    """Return the script's assumptions, for people."""
    planned = f"planned for {job.size}; the run will be called {job.name}"
    if form != "kuberay":
        return [planned, f"{job.folder} and {job.bin_dir} must be the same on every node"]
    return [
        planned,
        *(
            f"{key}={name} is a path of this host: the pods need it on their volume"
            for key, name in _names(job.loaded.recipe)
            if name and (job.folder / name).exists()
        ),
    ]


def _names(recipe: Recipe) -> Iterator[tuple[str, str | None]]:
    """(key, value) of all that may be a file or folder."""
    yield "model.path", recipe.model.path
    for field in FIELDS:
        yield from ((f"data.{field}", file.name) for file in files_of(recipe.data, field))
    yield "data.chat_template", recipe.data.chat_template
    yield "train.critic.path", recipe.train.critic.path
    yield from (("train.distill.teachers", teacher.path) for teacher in recipe.teachers)
    yield "rollout.reward_model.path", recipe.rollout.reward_model.path


def _one_line(text: str) -> str:
    """For comments, which a line break would end."""
    return " ".join(text.split())
