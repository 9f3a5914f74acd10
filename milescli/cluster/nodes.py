"""Chooses the computers of a run: this one, or nodes of an existing Ray cluster. The driver
compares and checks them before it creates a run directory or starts an actor."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.ray.each_node import NodeResult, joined, run_on_each_node
from milescli.backends.ray.nodes import ClusterNode, free_resources
from milescli.cluster.report import (
    FOLDER_DIGEST,
    HAS_NONCE,
    NODE_REPORT,
    NodeReport,
    folder_digest,
    node_report,
)
from milescli.core.errors import CheckpointError, FitError, MachineError
from milescli.platform.environment import INTERFACE_VARIABLES
from milescli.platform.machine import Device, Machine, Node
from milescli.platform.probe import probe
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.machine import MachineSettings

if TYPE_CHECKING:
    from milescli.console.output import Output

ANSWER_TIMEOUT_S = 120.0
"""Time limit for all nodes to answer: Ray starts a Python process there, and a vendor's tool takes
seconds."""


class TooFewNodes(MachineError):
    """Reports that a cluster has fewer usable nodes than a run wants."""

    num_usable: int = 0

    @classmethod
    def of(cls, settings: MachineSettings, answers: Sequence[NodeResult]) -> TooFewNodes:
        """Make the error from `answers`, those of the existing nodes."""
        silent = [f"{answer.node}: {answer.error}" for answer in answers if answer.error]
        there = ", ".join(str(answer.node) for answer in answers if not answer.error) or "none"
        num_usable = len(answers) - len(silent)
        error = cls(
            f"{settings.nodes} nodes are requested, but the Ray cluster at {settings.address} "
            f"has only {num_usable} usable",
            why=f"these nodes responded: {there}" + "".join(f"\n{line}" for line in silent),
            fix=[
                f"ray start --address={settings.address}   # on each further node",
                f"--nodes {max(1, num_usable)}",
            ],
        )
        error.num_usable = num_usable
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNode:
    """Describes one node of a cluster that the run takes."""

    node: ClusterNode
    report: NodeReport

    @property
    def devices(self) -> list[Device]:
        """Return the node's devices that Ray assigns."""
        return self.report.machine.nodes[0].devices[: self.node.num_gpus]

    def interface_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return GLOO_ and NCCL_SOCKET_IFNAME for processes on this node. The user's setting on the
        node or for the driver (`environ`) wins; else the interface whose address the other nodes
        know."""
        own = self.report.interfaces.get(self.node.address)
        chosen = {
            name: self.report.variables.get(name) or environ.get(name) or own
            for name in INTERFACE_VARIABLES
        }
        return {name: value for name, value in chosen.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNodes:
    """Describes all computers of a run."""

    machine: Machine
    """Machine for which the plan is made."""
    address: str | None = None
    """Address of the cluster; None: Ray is started on this computer, for this run alone."""
    chosen: tuple[RunNode, ...] = ()
    """[plan nodes] in the plan's order; empty without a cluster."""

    @property
    def spans_computers(self) -> bool:
        """Return True if some process will run on another computer than the driver."""
        return any(not member.node.is_driver for member in self.chosen)

    def describe(self) -> str:
        """Return the line that says where the run takes place."""
        names = ", ".join(str(member.node) for member in self.chosen)
        return f"Ray cluster at {self.address}: {names}"

    def require_shared(self, run_dir: Path, *model_dirs: Path) -> None:
        """Raise MachineError if another node cannot read the run directory, CheckpointError if a
        model folder of the run differs there."""
        if not self.spans_computers:
            return
        assert self.address is not None
        only = [member.node.node_id for member in self.chosen]
        with joined(self.address):
            _require_run_dir(run_dir, self.address, only)
            for model_dir in model_dirs:
                if run_dir not in model_dir.parents:
                    _require_model(model_dir, self.address, only)


def _require_run_dir(run_dir: Path, address: str, only: Sequence[str]) -> None:
    answers = _all_answered(probe_shared_folder(run_dir, address, only=only))
    blind = [answer.node for answer in answers if not answer.result]
    if blind:
        raise MachineError(
            f"the run directory is not shared with {', '.join(map(str, blind))}",
            why=f"a file written to {run_dir} here does not appear there, but the logs and "
            "checkpoints of all ranks go into it",
            fix=[
                "--set run.dir=FOLDER   # on a file system that all nodes share",
                f"mount {run_dir.parent} there",
            ],
        )


def _require_model(model_dir: Path, address: str, only: Sequence[str]) -> None:
    answers = _all_answered(
        run_on_each_node(
            address,
            FOLDER_DIGEST,
            {"folder": str(model_dir)},
            timeout_s=ANSWER_TIMEOUT_S,
            only=only,
        )
    )
    own = folder_digest(folder=str(model_dir))
    unlike = [answer for answer in answers if answer.result != own]
    if unlike:
        differences = "; ".join(
            f"{answer.node}: {'other files' if answer.result else 'no such folder'}"
            for answer in unlike
        )
        raise CheckpointError(
            f"the model differs between nodes: {model_dir}",
            why=f"every rank and engine reads it from there. {differences}",
            fix=[
                "--set model.path=FOLDER   # on a file system that all nodes share",
                f"rsync -a {model_dir}/ NODE:{model_dir}/",
            ],
        )


def probe_shared_folder(folder: Path, address: str, *, only: Sequence[str]) -> list[NodeResult]:
    """Test whether each node can read a file that is written to `folder` now, and return the
    answers. `only` limits the test to nodes with these ids. Raises OSError if the file cannot be
    written here."""
    nonce, file = secrets.token_hex(8), folder / f".miles-seen-{secrets.token_hex(4)}"
    file.write_text(nonce, encoding="utf-8")
    try:
        return run_on_each_node(
            address,
            HAS_NONCE,
            {"file": str(file), "nonce": nonce},
            timeout_s=ANSWER_TIMEOUT_S,
            only=only,
        )
    finally:
        file.unlink()


def planning_machine(loaded: LoadedRecipe) -> Machine:
    """Return the machine for which a plan is made without a run: this computer times the recipe's
    nodes, or the nodes of the named cluster."""
    settings = loaded.recipe.machine
    return probe() if settings.address is None else choose_nodes(settings).machine


def find_nodes(loaded: LoadedRecipe, *, output: Output | None) -> RunNodes:
    """Return the computers of a run. Reports a joined cluster in one line, with the setting that
    named it. Raises as `choose_nodes` does."""
    nodes = choose_nodes(loaded.recipe.machine)
    if nodes.address is not None and output is not None:
        output.note(f"{nodes.describe()} ({loaded.origins['machine.address']})")
    return nodes


def choose_nodes(settings: MachineSettings) -> RunNodes:
    """Return the computers of a run with these settings. Raises MachineError if several are wanted
    and no cluster is named, if too few answer, or if they differ in what must be equal; FitError if
    they have fewer devices than wanted."""
    if settings.address is None:
        if settings.nodes > 1:
            raise _no_cluster_named(settings.nodes)
        return RunNodes(machine=probe())
    with joined(settings.address):
        answers = run_on_each_node(settings.address, NODE_REPORT, timeout_s=ANSWER_TIMEOUT_S)
        free = free_resources()
    members = [
        RunNode(node=answer.node, report=answer.result)
        for answer in answers
        if answer.error is None
    ]
    if len(members) < settings.nodes:
        raise TooFewNodes.of(settings, answers)
    chosen = _choose(members, settings, free)
    _require_same_software(chosen)
    if settings.gpus != 0:
        _require_same_devices(chosen)
    _require_devices(chosen, settings)
    return RunNodes(machine=_as_one_machine(chosen), address=settings.address, chosen=tuple(chosen))


def _no_cluster_named(num_nodes: int) -> MachineError:
    """Return the error that several computers are wanted but no cluster is named."""
    return MachineError(
        f"{num_nodes} nodes are requested, but no Ray cluster is named",
        why="miles starts Ray only on this computer; for several nodes it joins a running cluster",
        fix=[
            "ray start --head --port=6379   # here; `ray start --address=HOST:6379` on the "
            "others; then add --address HOST:6379",
            "export RAY_ADDRESS=HOST:6379   # the same as --address",
            "--emit slurm   # or kuberay, ssh: prints a script that does all this",
        ],
    )


def _choose(
    members: list[RunNode], settings: MachineSettings, free: Mapping[str, Mapping[str, float]]
) -> list[RunNode]:
    """Choose `settings.nodes` of them: first those with enough devices that are free, then those
    with enough devices. Returns them in the given order."""

    def lacks(member: RunNode) -> tuple[bool, bool]:
        there = len(member.devices)
        wanted = there if settings.gpus is None else settings.gpus
        useless = there < wanted or (settings.gpus is None and not there)
        return useless, free.get(member.node.node_id, {}).get("GPU", 0.0) < wanted

    best = sorted(members, key=lacks)[: settings.nodes]
    return [member for member in members if member in best]


def _require_same_software(chosen: Sequence[RunNode]) -> None:
    """Compare each node's software with that of this program."""
    mine = node_report().versions
    for member in chosen:
        theirs = {name: member.report.versions.get(name, "missing") for name in mine}
        unlike = [name for name in mine if theirs[name] != mine[name]]
        if unlike:
            raise MachineError(
                f"{member.node} runs different software than this computer",
                why="; ".join(
                    f"{name} is {theirs[name]} there and {mine[name]} here" for name in unlike
                ),
                fix=f"on {member.node.address}: ray stop, install the same versions, then `ray "
                "start --address=...` from that environment",
            )


def _require_same_devices(chosen: Sequence[RunNode]) -> None:
    kinds = {_device_names(member): member for member in chosen}
    if len(kinds) > 1:
        raise MachineError(
            "the nodes differ",
            why="; ".join(
                f"{member.node} has {names or 'no devices'}" for names, member in kinds.items()
            )
            + "; a plan needs identical nodes",
            fix=[
                "--gpus 0   # run on their CPUs",
                "exclude the different ones: --nodes N, or `ray stop` there",
            ],
        )


def _device_names(member: RunNode) -> str:
    return ", ".join(sorted({device.name for device in member.devices}))


def _require_devices(chosen: Sequence[RunNode], settings: MachineSettings) -> None:
    for member in chosen:
        there = len(member.devices)
        if settings.gpus is not None and settings.gpus > there:
            raise FitError(
                f"{settings.gpus} GPUs per node are requested, but {member.node} has {there}",
                why="; ".join(f"{other.node} has {len(other.devices)}" for other in chosen),
                fix=[
                    f"--gpus {there}" if there else "--gpus 0   # run on their CPUs",
                    "ray status",
                ],
            )


def _as_one_machine(chosen: Sequence[RunNode]) -> Machine:
    """Return a machine of all nodes, each with the resources of the weakest: a plan gives every
    node the same."""
    nodes = [member.report.machine.nodes[0] for member in chosen]
    weakest: Node = replace(
        nodes[0],
        devices=min((member.devices for member in chosen), key=len),
        cpu_cores=min(node.cpu_cores for node in nodes),
        memory_bytes=min(node.memory_bytes for node in nodes),
        shm_bytes=min(node.shm_bytes for node in nodes),
    )
    return replace(chosen[0].report.machine, nodes=[weakest] * len(nodes))


def _all_answered(answers: list[NodeResult]) -> list[NodeResult]:
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return answers
