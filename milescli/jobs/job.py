"""Describes a run as a job of another cluster: the plan, the user's own command, and the values
that every form of a script needs. Starts nothing, and writes no file."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from milescli.core.errors import MachineError
from milescli.plan.types import Plan
from milescli.platform.machine import Machine
from milescli.platform.probe import probe
from milescli.recipe.layers import SettingsLayer
from milescli.recipe.load import LoadedRecipe, value_at
from milescli.recipe.machine import MachineSettings
from milescli.recipe.section import plain
from milescli.recipe.several import KEY as ADAPTERS
from milescli.recipe.several import to_options

SET_BY_SCRIPT = ("run.name", "machine.nodes", "machine.gpus", "machine.address")
"""Keys that the script sets itself."""

_LONGEST_LABEL = 47
"""Characters of the name of a RayJob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Holds what every kind of job script needs to know."""

    loaded: LoadedRecipe
    plan: Plan
    machine: Machine
    folder: Path
    """The user's working folder; on a cluster with a shared file system the job runs there."""
    bin_dir: Path
    """Folder of `miles` and `ray`."""
    on: str | None = None
    """Value of `--on`; None: nodes like this host."""

    @property
    def num_nodes(self) -> int:
        return self.loaded.recipe.machine.nodes

    @property
    def gpus(self) -> int:
        """Return the GPUs of one node; 0 on a CPU."""
        if self.plan.device_kind == "cpu":
            return 0
        return self.loaded.recipe.machine.gpus or min(
            len(node.devices) for node in self.machine.nodes
        )

    @property
    def ray_cpus(self) -> int:
        """Return Ray's CPU count for one node, which counts tokens, not cores: a slot takes two,
        and one is left for node queries."""
        return 2 * max(Counter(slot.node for slot in self.plan.slots).values()) + 1

    @property
    def share(self) -> float:
        """Return the share of a node that the job takes."""
        num_devices = min(len(node.devices) for node in self.machine.nodes)
        return self.gpus / num_devices if self.gpus else 1.0

    @property
    def run_dir(self) -> str:
        """Return the folder of runs."""
        return self.loaded.recipe.run.dir

    @property
    def name(self) -> str:
        """Return the name of the run: the user's own, or one that equal commands share, so that a
        restarted script resumes its run."""
        command = json.dumps([self.plan.fingerprint, *self.words(recipe=self.loaded.source)])
        digest = hashlib.sha256(command.encode()).hexdigest()[:8]
        return self.loaded.recipe.run.name or f"{self.loaded.recipe.name}-{digest}"

    @property
    def label(self) -> str:
        """Return the name as a DNS label that no other name has; one that the label cannot spell
        ends with a digest."""
        exact = f"miles-{self.name}"
        label = re.sub(r"[^a-z0-9]+", "-", exact.lower())[:_LONGEST_LABEL].strip("-")
        if label == exact:
            return label
        end = f"-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"
        return label[: _LONGEST_LABEL - len(end)].strip("-") + end

    def words(self, *, recipe: str) -> list[str]:
        """Return the user's own command without the options that the plan settles. It spells out
        what the environment and files of this host say, since the cluster may differ."""
        pairs = [["--recipe", recipe]]
        for key, origin in self.loaded.origins.items():
            if key in SET_BY_SCRIPT or origin.layer in (
                SettingsLayer.DEFAULT,
                SettingsLayer.ALGORITHM,
                SettingsLayer.RECIPE,
            ):
                continue
            if key == ADAPTERS and origin.layer is SettingsLayer.SET:
                pairs += to_options(origin.where)
                continue
            option, _, text = origin.where.partition(" ")
            value = json.dumps(plain(value_at(self.loaded.recipe, key)))
            pair = (
                [option, text] if origin.layer is SettingsLayer.SET else ["--set", f"{key}={value}"]
            )
            if pair not in pairs:  # one --set may fill a whole section
                pairs.append(pair)
        return [word for pair in pairs for word in pair]

    def launch(self, *, recipe: str) -> list[str]:
        """Return the command that the script runs, without --address."""
        where = ["--nodes", str(self.num_nodes), "--gpus", str(self.gpus), "--name", self.name]
        return ["miles", "launch", *self.words(recipe=recipe), *where]

    @property
    def size(self) -> str:
        """Describe the nodes for people: `4 nodes of 8 x NVIDIA H200`."""
        node = self.machine.nodes[0]
        parts = f"{self.gpus} x {node.devices[0].name}" if self.gpus else f"{node.cpu_cores} cores"
        return f"{self.num_nodes} node{'s'[: self.num_nodes > 1]} of {parts}"


def machine_like_this(settings: MachineSettings) -> Machine:
    """Return the machine for which a job is planned if `--on` describes no nodes: nodes like this
    host. Raises MachineError if the host lacks the wanted GPUs."""
    machine = probe()
    visible = len(machine.nodes[0].devices)
    if (settings.gpus or 0) > visible:
        raise MachineError(
            f"{settings.gpus} GPUs per node are requested, but this host has {visible}",
            why="a job is planned for nodes like this one unless you describe them",
            fix=[
                f"--on {settings.nodes}x{settings.gpus}xH200",
                "--on nodes.yaml   # any other machine, described in a file",
            ],
        )
    return machine
