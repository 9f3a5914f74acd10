"""What the machine has, as plain data: read from a file, named (`8xH200`) or probed. Nothing is detected here (`probe`)."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from milescli.core.errors import MachineError, RecipeError
from milescli.core.registry import nearest
from milescli.core.units import GIB

Kind = Literal["cuda", "rocm", "cpu"]
Interconnect = Literal["nvlink", "xgmi", "pcie", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator."""

    index: int
    """As the vendor's tool counts on this node, before any visibility variable."""
    name: str
    """NVIDIA H200"""
    memory_bytes: int
    """0 where the vendor's tool does not say."""
    arch: str
    """sm_90, gfx942"""
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One computer."""

    devices: list[Device] = field(default_factory=list)
    """Those that may be used; empty on a CPU."""
    cpu_cores: int
    """Physical cores that this process may use: affinity and cgroup limits are taken off."""
    memory_bytes: int
    """Main memory that this process may use."""
    shm_bytes: int
    """Size of /dev/shm; 0 where there is none."""
    num_numa_nodes: int = 1
    interconnect: Interconnect = "none"
    """The slowest link between any two of its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All nodes; alike in kind."""

    kind: Kind
    nodes: list[Node]
    driver_version: str = ""
    runtime_version: str = ""
    """CUDA or ROCm."""
    visibility: dict[str, str] = field(default_factory=dict)
    """Those of CUDA_, HIP_ and ROCR_VISIBLE_DEVICES that are set."""
    notes: list[str] = field(default_factory=list)
    """What was odd while probing, for people."""

    def to_json(self) -> str:
        """Stable; `from_text` reads it."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_text(cls, text: str, *, origin: str) -> Machine:
        """From JSON or YAML. Raises RecipeError where it is neither, or a key is unknown or missing."""
        try:
            raw = yaml.safe_load(text)
            nodes = [Node(**{**node, "devices": [Device(**each) for each in node.get("devices", [])]}) for node in raw["nodes"]]
            machine = cls(**{**raw, "nodes": nodes})
        except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
            raise RecipeError(
                f"{origin} does not describe a machine",
                why=str(error).removeprefix("Machine.").removeprefix("Node.").removeprefix("Device."),
                fix="python -c 'from milescli.platform.probe import probe; print(probe().to_json())'   # what one looks like",
            ) from error
        machine.check(origin)
        return machine

    def check(self, origin: str) -> None:
        """Raises RecipeError where the parts contradict each other."""
        if self.kind not in ("cuda", "rocm", "cpu") or not self.nodes:
            raise RecipeError(
                f"{origin} does not describe a machine",
                why=f"kind is {self.kind!r} and there are {len(self.nodes)} nodes; kind is cuda, rocm or cpu, and a node is needed",
                fix=f"set `kind` and `nodes` in {origin}",
            )
        if (self.kind == "cpu") == any(node.devices for node in self.nodes):
            raise RecipeError(
                f"{origin} contradicts itself",
                why=f"kind is {self.kind}, and {sum(len(node.devices) for node in self.nodes)} devices are listed",
                fix=f"set `kind` in {origin} to {'cuda or rocm' if self.kind == 'cpu' else 'cpu, or list the devices'}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A device as its maker sells it."""

    kind: Kind
    name: str
    memory_gib: int
    """As the vendor's tool shows it, rounded down."""
    arch: str
    interconnect: Interconnect


DEVICE_MODELS: dict[str, _Model] = {
    "A100": _Model(kind="cuda", name="NVIDIA A100-SXM4-80GB", memory_gib=80, arch="sm_80", interconnect="nvlink"),
    "L40S": _Model(kind="cuda", name="NVIDIA L40S", memory_gib=44, arch="sm_89", interconnect="pcie"),
    "RTX4090": _Model(kind="cuda", name="NVIDIA GeForce RTX 4090", memory_gib=23, arch="sm_89", interconnect="pcie"),
    "H100": _Model(kind="cuda", name="NVIDIA H100 80GB HBM3", memory_gib=79, arch="sm_90", interconnect="nvlink"),
    "H200": _Model(kind="cuda", name="NVIDIA H200", memory_gib=140, arch="sm_90", interconnect="nvlink"),
    "B200": _Model(kind="cuda", name="NVIDIA B200", memory_gib=179, arch="sm_100", interconnect="nvlink"),
    "B300": _Model(kind="cuda", name="NVIDIA B300", memory_gib=268, arch="sm_103", interconnect="nvlink"),
    "GB200": _Model(kind="cuda", name="NVIDIA GB200", memory_gib=184, arch="sm_100", interconnect="nvlink"),
    "GB300": _Model(kind="cuda", name="NVIDIA GB300", memory_gib=277, arch="sm_103", interconnect="nvlink"),
    "MI300X": _Model(kind="rocm", name="AMD Instinct MI300X", memory_gib=191, arch="gfx942", interconnect="xgmi"),
    "MI325X": _Model(kind="rocm", name="AMD Instinct MI325X", memory_gib=255, arch="gfx942", interconnect="xgmi"),
    "MI350X": _Model(kind="rocm", name="AMD Instinct MI350X", memory_gib=287, arch="gfx950", interconnect="xgmi"),
    "MI355X": _Model(kind="rocm", name="AMD Instinct MI355X", memory_gib=287, arch="gfx950", interconnect="xgmi"),
}
"""What `8xNAME` can say. GB200 and GB300 come as trays of four: `16x4xGB300`."""

_NAMED = re.compile(r"(?:(?:(?P<nodes>\d+)x)?(?P<devices>\d+)x)?(?P<model>[A-Za-z][A-Za-z0-9]*)")


def parse_machine(text: str) -> Machine:
    """`8xH200`, `16x8xMI355X` (nodes x devices), `H100`, or `cpu`. Hosts are taken to be as such machines usually are.

    Raises MachineError where the name is unknown.
    """
    found = _NAMED.fullmatch(text.strip())
    name = found["model"].upper() if found else ""
    if found and name == "CPU":
        num_nodes = int(found["devices"] or 1)
        return Machine(
            kind="cpu", nodes=[Node(cpu_cores=8, memory_bytes=32 * GIB, shm_bytes=16 * GIB) for _ in range(num_nodes)]
        )
    num_nodes, num_devices = (int(found["nodes"] or 1), int(found["devices"] or 1)) if found else (0, 0)
    if name not in DEVICE_MODELS or not num_nodes or not num_devices:
        guess = nearest(name or text, DEVICE_MODELS) or "H200"
        raise MachineError(
            f"`{text}` names no machine that miles knows",
            why=f"it must look like 8xH200 or 16x8xMI355X (nodes x devices x model) or cpu; models: {', '.join(DEVICE_MODELS)}",
            fix=[f"{num_devices or 8}x{guess}", "or describe it in a file"],
        )
    model = DEVICE_MODELS[name]
    devices = [
        Device(index=index, name=model.name, memory_bytes=model.memory_gib * GIB, arch=model.arch)
        for index in range(num_devices)
    ]
    node = Node(
        devices=devices,
        cpu_cores=12 * num_devices,
        memory_bytes=max(256, 2 * model.memory_gib * num_devices) * GIB,
        shm_bytes=128 * GIB,
        num_numa_nodes=2 if num_devices > 4 else 1,
        interconnect=model.interconnect if num_devices > 1 else "none",
    )
    return Machine(kind=model.kind, nodes=[node] * num_nodes)


def read_machine(text: str) -> Machine:
    """A name as in `parse_machine`, or the path of a .json, .yaml or .yml file."""
    path = Path(text)
    if path.suffix not in (".json", ".yaml", ".yml"):
        return parse_machine(text)
    if not path.is_file():
        raise RecipeError(f"there is no file {path}", why="it should describe a machine", fix="8xH200   # or name one")
    return Machine.from_text(path.read_text(encoding="utf-8"), origin=str(path))
