"""Makes a job script: fills in a form of templates/jobs for SLURM, KubeRay or plain ssh. Called by
`miles launch --emit`."""

from __future__ import annotations

import json
import math
import posixpath
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from milescli import __version__
from milescli.core.pins import pin
from milescli.core.units import GIB, format_duration
from milescli.jobs.job import Job
from milescli.recipe.data_files import FIELDS, files_of
from milescli.recipe.schema import Recipe
from milescli.recipe.templates import find_recipe, templates_dir

Form = Literal["slurm", "kuberay", "ssh"]
LONGEST_S = 24 * 3600
"""Longest SLURM job, since partitions have limits; a run that needs more is queued again."""
START_S = 1800
"""Estimated seconds for downloads, conversion and start, which are added to a time limit."""
SHORTEST_NOTICE_S = 300
"""Shortest notice before a time limit, to save."""
SAVE_S = 120
"""Part of that notice for the checkpoint; the rest is for the step in progress."""
WORKDIR = "/work"
"""Working folder of the images."""
POD_SHARE = 0.75
"""Share of a node's cores and memory that a pod requests: Kubernetes' own services need the
rest."""
JOB_FILES = "/etc/miles"
"""Where a pod mounts the ConfigMap."""
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


def shared_folder_values(job: Job) -> dict[str, str]:
    """Return the values that SLURM and ssh share: this folder and this environment on every
    node."""
    resources = [f"--num-cpus={job.ray_cpus}", f"--num-gpus={job.gpus}"]
    return {
        "nodes": str(job.num_nodes),
        "folder": shlex.quote(str(job.folder)),
        "bin": shlex.quote(str(job.bin_dir)),
        "launch": shlex.join(job.launch(recipe=job.loaded.source)),
        "run": shlex.quote(str(Path(job.run_dir).expanduser() / job.name)),
        "start_s": str(math.ceil(job.loaded.recipe.machine.start_timeout_s)),
        "resources": " ".join(resources),
    }


def slurm_values(job: Job) -> dict[str, str]:
    """Return the shared values and SLURM's own: devices, memory, time and a signal before the
    end."""
    forecast, lines = job.plan.forecast, []
    if job.gpus:
        lines.append(f"#SBATCH --gres=gpu:{job.gpus}")
    if job.share == 1.0:
        lines += ["#SBATCH --exclusive", "#SBATCH --mem=0"]
    else:
        node = job.machine.nodes[0]
        lines += [
            f"#SBATCH --cpus-per-task={math.floor(node.cpu_cores * job.share)}",
            f"#SBATCH --mem={math.floor(node.memory_bytes * job.share / GIB)}G",
        ]
    notice_s = SHORTEST_NOTICE_S
    if forecast:
        notice_s = max(SHORTEST_NOTICE_S, math.ceil(2 * forecast.step_s) + SAVE_S)
        run_s, steps = forecast.step_s * job.plan.steps, job.plan.steps
        limit_s = min(LONGEST_S, 2 * run_s + START_S)
        basis = (
            f"{steps} steps are estimated at {format_duration(run_s)}: twice that and half an "
            "hour, a day at most"
        )
        if job.loaded.recipe.train.epochs is not None:
            limit_s = LONGEST_S
            basis = "a day: the rows decide the number of steps (`train.epochs`)"
        minutes = math.ceil(limit_s / 60)
        lines += [
            f"# {basis}",
            f"#SBATCH --time={minutes // 60:02}:{minutes % 60:02}:00",
        ]
    return {
        **shared_folder_values(job),
        "job": job.label,
        "sbatch": "\n".join(lines),
        "notice_s": str(notice_s),
    }


def kuberay_values(job: Job) -> dict[str, str]:
    """Return the values for the placeholders of kuberay.yaml."""
    recipe, embedded = job.loaded.source, ""
    path = find_recipe(recipe, cwd=job.folder)
    if path.parent != templates_dir():  # the image has those that ship
        key = re.sub(r"[^-._a-zA-Z0-9]", "-", path.name)
        recipe = f"{JOB_FILES}/{key}"
        text = textwrap.indent(path.read_text(encoding="utf-8"), "    ")
        embedded = f"  {key}: |2\n{text}\n"  # the first line of a recipe may be indented itself
    node = job.machine.nodes[0]
    cores, memory_gib = (
        math.floor(POD_SHARE * job.share * size)
        for size in (node.cpu_cores, node.memory_bytes / GIB)
    )
    resource = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}.get(job.plan.device_kind)
    share = [
        f'cpu: "{max(1, cores)}"',
        f"memory: {max(1, memory_gib)}Gi",
        *([f'{resource}: "{job.gpus}"'] if resource else []),
    ]
    mount = posixpath.normpath(posixpath.join(WORKDIR, job.run_dir))
    arch = f" GFX={node.devices[0].arch.upper()}" if job.plan.device_kind == "rocm" else ""
    return {
        "job": job.label,
        "launch": textwrap.indent(shlex.join(job.launch(recipe=recipe)), "    ").lstrip(),
        "run": shlex.quote(posixpath.join(job.run_dir, job.name)),
        "recipe_file": embedded,
        "fingerprint": job.plan.fingerprint,
        "ray": pin("ray"),
        "ray_cpus": str(job.ray_cpus),
        "gpus": str(job.gpus),
        "kind": job.plan.device_kind,
        "image": f"KIND={job.plan.device_kind}{arch}",
        "share": ", ".join(share),
        "mount": json.dumps(mount),
        "cache": json.dumps(posixpath.join(mount, ".huggingface")),
        "shm": f"{max(1, min(math.floor(node.shm_bytes / GIB), memory_gib // 4))}Gi",
        "num_workers": str(job.num_nodes - 1),
    }


FORMS: dict[Form, tuple[str, Callable[[Job], dict[str, str]]]] = {
    "slurm": ("slurm.sh", slurm_values),
    "kuberay": ("kuberay.yaml", kuberay_values),
    "ssh": ("ssh.sh", shared_folder_values),
}
"""Form -> (its file in templates/jobs, function that returns the values of its placeholders)."""


def _names(recipe: Recipe) -> Iterator[tuple[str, str | None]]:
    """Yield (key, value) of all recipe keys that may name a file or folder."""
    yield "model.path", recipe.model.path
    for field in FIELDS:
        yield from ((f"data.{field}", file.name) for file in files_of(recipe.data, field))
    yield "data.chat_template", recipe.data.chat_template
    yield "train.critic.path", recipe.train.critic.path
    yield from (("train.distill.teachers", teacher.path) for teacher in recipe.teachers)
    yield "rollout.reward_model.path", recipe.rollout.reward_model.path


def _one_line(text: str) -> str:
    """Return the text on one line, for comments, which a line break would end."""
    return " ".join(text.split())
