"""A plan as a job for a cluster: the forms of templates/jobs filled in for SLURM, KubeRay or plain
ssh. Starts nothing, and writes no file."""

from __future__ import annotations

import hashlib
import json
import math
import posixpath
import re
import shlex
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from milescli import __version__
from milescli.core.errors import MachineError
from milescli.core.pins import pin
from milescli.core.units import GIB, format_duration
from milescli.plan.types import Plan
from milescli.platform.machine import Machine
from milescli.platform.probe import probe
from milescli.recipe.layers import Layer
from milescli.recipe.load import LoadedRecipe, value_at
from milescli.recipe.templates import find_recipe, templates_dir
from milescli.runtime.inputs import facts_of_recipe
from milescli.runtime.launch import plan_only, refuse_unproven

Form = Literal["slurm", "kuberay", "ssh"]
FILES: dict[Form, str] = {"slurm": "slurm.sh", "kuberay": "kuberay.yaml", "ssh": "ssh.sh"}
"""In templates/jobs."""

OWN = ("run.name", "machine.nodes", "machine.gpus", "machine.address")
"""Keys that the script sets itself."""
PATHS = ("model.path", "data.prompts", "data.eval", "data.demonstrations")
"""Keys that may name files of this host."""
WORKDIR = "/work"
"""Of the images."""
FILES_OF_JOB = "/etc/miles"
"""Where a pod sees the ConfigMap."""
LONGEST_S = 24 * 3600
"""Of a SLURM job, since partitions have limits; a run that needs more is queued again."""
START_S = 1800
"""Room for downloads, conversion and start in a time limit. An estimate."""
SHORTEST_NOTICE_S = 300
"""Before a time limit, to save."""

_PLACEHOLDER = re.compile(r"@([a-z_]+)@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every form needs to know."""

    loaded: LoadedRecipe
    plan: Plan
    machine: Machine
    folder: Path
    """Where the user stands; on a cluster with a shared file system the job runs there."""
    bin_dir: Path
    """Where `miles` and `ray` lie."""
    machine_words: str | None = None
    """What `--on` said."""

    @property
    def num_nodes(self) -> int:
        return self.loaded.recipe.machine.nodes

    @property
    def gpus(self) -> int:
        """Of one node; 0 on a CPU."""
        if self.plan.device_kind == "cpu":
            return 0
        return self.loaded.recipe.machine.gpus or min(
            len(node.devices) for node in self.machine.nodes
        )

    @property
    def ray_cpus(self) -> int:
        """Ray's counters on one node, not cores: a slot takes two, and one is left for questions to
        the node."""
        return 2 * max(Counter(slot.node for slot in self.plan.slots).values()) + 1

    @property
    def share(self) -> float:
        """Of a node that the job takes."""
        num_devices = min(len(node.devices) for node in self.machine.nodes)
        return self.gpus / num_devices if self.gpus else 1.0

    @property
    def run_dir(self) -> str:
        """Runs live here."""
        return self.loaded.recipe.run.dir

    @property
    def name(self) -> str:
        """Of the run. The user's own, or one that equal wishes share: a script that is started
        again goes on with its run."""
        wish = json.dumps([self.plan.fingerprint, *self.words(recipe=self.loaded.source)])
        digest = hashlib.sha256(wish.encode()).hexdigest()[:8]
        return self.loaded.recipe.run.name or f"{self.loaded.recipe.name}-{digest}"

    @property
    def label(self) -> str:
        """The name as DNS takes it, in 47 characters: a RayJob's may not be longer."""
        label = re.sub(r"[^a-z0-9]+", "-", f"miles-{self.name}".lower())
        return label[:47].strip("-")

    def words(self, *, recipe: str) -> list[str]:
        """The user's own command, less what the plan settles. What the environment and files of
        this host say is said here too, since the cluster may have others."""
        found = [["--recipe", recipe]]
        for key, origin in self.loaded.origins.items():
            if key in OWN or origin.layer in (Layer.DEFAULT, Layer.RECIPE):
                continue
            option, _, text = origin.where.partition(" ")
            value = json.dumps(value_at(self.loaded.recipe, key))
            pair = [option, text] if origin.layer is Layer.SET else ["--set", f"{key}={value}"]
            if pair not in found:  # one --set may fill a whole section
                found.append(pair)
        return [word for pair in found for word in pair]

    def launch(self, *, recipe: str) -> list[str]:
        """The command that the script runs, --address aside."""
        where = ["--nodes", str(self.num_nodes), "--gpus", str(self.gpus), "--name", self.name]
        return ["miles", "launch", *self.words(recipe=recipe), *where]


def job_of(
    loaded: LoadedRecipe,
    *,
    machine: Machine | None,
    folder: Path,
    bin_dir: Path,
    machine_words: str | None = None,
) -> Job:
    """Plan for `machine`, which the user called `machine_words`, or for nodes like this one. Raises
    MachineError where this one lacks the GPUs that are wanted, and whatever a plan raises."""
    wanted = loaded.recipe.machine
    if machine is None:
        machine = probe()
        visible = len(machine.nodes[0].devices)
        if (wanted.gpus or 0) > visible:
            raise MachineError(
                f"{wanted.gpus} GPUs per node are wanted, and this host has {visible}",
                why="a job is planned for nodes like this host unless they are described",
                fix=[
                    f"--on {wanted.nodes}x{wanted.gpus}xH200",
                    "--on nodes.yaml   # any other machine, as a file",
                ],
            )
    facts = facts_of_recipe(loaded.recipe.model)
    refuse_unproven(loaded.recipe, facts)
    plan = plan_only(loaded, machine, facts=facts)
    return Job(
        loaded=loaded,
        plan=plan,
        machine=machine,
        folder=folder,
        bin_dir=bin_dir,
        machine_words=machine_words,
    )


def script(job: Job, form: Form) -> str:
    """The whole script, ready for `sbatch`, `kubectl apply` or `bash`."""
    of_form = {"slurm": _slurm, "kuberay": _kuberay, "ssh": _on_shared_folder}[form](job)
    machine_words = ["--on", job.machine_words] if job.machine_words else []
    made_by = shlex.join([*job.launch(recipe=job.loaded.source), *machine_words, "--emit", form])
    common = {
        "title": _one_line(
            f"{job.loaded.recipe.name}: {_size(job)}; plan {job.plan.fingerprint}, miles "
            f"{__version__}"
        ),
        "made_by": _one_line(made_by),
    }
    return fill(
        (templates_dir() / "jobs" / FILES[form]).read_text(encoding="utf-8"), {**common, **of_form}
    )


def fill(form: str, values: dict[str, str]) -> str:
    """Put a value in the place of each `@name@`. A name without a value, or a value without a
    place, is our mistake."""
    names = set(_PLACEHOLDER.findall(form))
    assert names == set(values), (sorted(names - set(values)), sorted(set(values) - names))
    return _PLACEHOLDER.sub(lambda found: values[found[1]], form)


def notes(job: Job, form: Form) -> list[str]:
    """What the script takes for granted, for people."""
    told = [f"planned for {_size(job)}; the run will be called {job.name}"]
    if form != "kuberay":
        return [*told, f"{job.folder} and {job.bin_dir} must be the same on every node"]
    recipe = job.loaded.recipe
    local = [key for key in PATHS if (job.folder / str(value_at(recipe, key) or "?")).exists()]
    return [
        *told,
        *(
            f"{key}={value_at(recipe, key)} is a path of this host: the pods need it on their "
            "volume"
            for key in local
        ),
    ]


def _one_line(text: str) -> str:
    """For comments, which a line break would end."""
    return " ".join(text.split())


def _size(job: Job) -> str:
    node = job.machine.nodes[0]
    each = f"{job.gpus} x {node.devices[0].name}" if job.gpus else f"{node.cpu_cores} cores"
    return f"{job.num_nodes} node{'s'[: job.num_nodes > 1]} of {each}"


def _on_shared_folder(job: Job) -> dict[str, str]:
    """What SLURM and ssh have in common: this folder and this environment on every node."""
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


def _slurm(job: Job) -> dict[str, str]:
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
        notice_s = max(SHORTEST_NOTICE_S, math.ceil(2 * forecast.step_s) + 120)
        run_s = forecast.step_s * job.plan.steps
        minutes = math.ceil(min(LONGEST_S, 2 * run_s + START_S) / 60)
        lines += [
            f"# {job.plan.steps} steps are estimated at {format_duration(run_s)}: twice that and "
            "half an hour, a day at most",
            f"#SBATCH --time={minutes // 60:02}:{minutes % 60:02}:00",
        ]
    return {
        **_on_shared_folder(job),
        "job": job.label,
        "sbatch": "\n".join(lines),
        "notice_s": str(notice_s),
    }


def _kuberay(job: Job) -> dict[str, str]:
    recipe, embedded = job.loaded.source, ""
    path = find_recipe(recipe, cwd=job.folder)
    if path.parent != templates_dir():  # the image has those that ship
        key = re.sub(r"[^-._a-zA-Z0-9]", "-", path.name)
        recipe = f"{FILES_OF_JOB}/{key}"
        embedded = f"  {key}: |\n{textwrap.indent(path.read_text(encoding='utf-8'), '    ')}\n"
    node = job.machine.nodes[0]
    cores, memory_gib = (
        math.floor(0.75 * job.share * size) for size in (node.cpu_cores, node.memory_bytes / GIB)
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
