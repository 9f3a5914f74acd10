"""Fills in a RayJob of KubeRay: identical pods, and the recipe if it is the user's own."""

from __future__ import annotations

import json
import math
import posixpath
import re
import shlex
import textwrap

from milescli.core.pins import pin
from milescli.core.units import GIB
from milescli.jobs.job import Job
from milescli.recipe.templates import find_recipe, templates_dir

WORKDIR = "/work"
"""Working folder of the images."""
POD_SHARE = 0.75
"""Share of a node's cores and memory that a pod requests: Kubernetes' own services need the
rest."""
JOB_FILES = "/etc/miles"
"""Where a pod mounts the ConfigMap."""


def kuberay_values(job: Job) -> dict[str, str]:
    """Return the values for the placeholders of kuberay.yaml."""
    recipe, embedded = job.loaded.source, ""
    path = find_recipe(recipe, cwd=job.folder)
    if path.parent != templates_dir():  # the image has those that ship
        key = re.sub(r"[^-._a-zA-Z0-9]", "-", path.name)
        recipe = f"{JOB_FILES}/{key}"
        embedded = f"  {key}: |\n{textwrap.indent(path.read_text(encoding='utf-8'), '    ')}\n"
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
