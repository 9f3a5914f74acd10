"""Describes a machine as plain data: read from a file, named (`8xH200`) or probed. Detects nothing
itself (`probe` does)."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import yaml

from milescli.core.errors import MachineError, RecipeError, nearest
from milescli.core.files import parse_yaml, read_regular_text
from milescli.core.units import GIB

Kind = Literal["cuda", "rocm", "cpu"]
Interconnect = Literal["nvlink", "xgmi", "pcie", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Describes one accelerator."""

    index: int
    """Index in the vendor's tool on this node, before any visibility variable."""
    name: str
    """NVIDIA H200"""
    memory_bytes: int
    """0 if the vendor's tool does not say."""
    arch: str
    """sm_90, gfx942"""
    uuid: str = ""
    """GPU-..., or MIG-... of an instance that device `index` is cut into."""


def is_instance(device: Device) -> bool:
    """Return True if the device is a MIG instance of a GPU."""
    return device.uuid.startswith("MIG-")


def is_accelerator(device: Device) -> bool:
    """Return False for listed devices that miles cannot use: AMD's graphics cards and integrated
    GPUs (only CDNA has the matrix units for SGLang's kernels), and NVIDIA's before sm_75 (torch has
    no code for them). Return True if the architecture is unknown."""
    if device.arch.startswith("gfx"):
        return device.arch in _CDNA
    number = device.arch.removeprefix("sm_")
    return not number.isdigit() or int(number) >= 75


_CDNA = ("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Describes one computer."""

    devices: list[Device] = field(default_factory=list)
    """Usable devices; empty on a CPU."""
    cpu_cores: int
    """Physical cores that this process may use: affinity and cgroup limits are taken off."""
    memory_bytes: int
    """Main memory that this process may use."""
    available_bytes: int | None = None
    """Memory that was available when the computer was probed; None for a machine that is only
    described."""
    shm_bytes: int
    """Size of /dev/shm; 0 if there is none."""
    num_numa_nodes: int = 1
    interconnect: Interconnect = "none"
    """The slowest link between any two of its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Describes all nodes, which are of one kind."""

    kind: Kind
    nodes: list[Node]
    driver_version: str = ""
    runtime_version: str = ""
    """Version of CUDA or ROCm."""
    visibility: dict[str, str] = field(default_factory=dict)
    """Set variables among CUDA_, HIP_ and ROCR_VISIBLE_DEVICES."""
    notes: list[str] = field(default_factory=list)
    """Oddities found while probing, for people."""

    def when_idle(self) -> Machine:
        """Return the machine as if nothing else ran on it, since what holds memory now will have
        ended."""
        return replace(self, nodes=[replace(node, available_bytes=None) for node in self.nodes])

    def to_json(self) -> str:
        """Return stable JSON, which `from_text` reads."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_text(cls, text: str, *, origin: str) -> Machine:
        """Parse JSON or YAML. Raises RecipeError if it is neither, or if a key is unknown or
        missing."""
        try:
            raw = parse_yaml(text)
            nodes = [
                Node(
                    **{**node, "devices": [Device(**device) for device in node.get("devices", [])]}
                )
                for node in raw["nodes"]
            ]
            machine = cls(**{**raw, "nodes": nodes})
        except (yaml.YAMLError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RecipeError(
                f"{origin} does not describe a machine",
                why=str(error)
                .removeprefix("Machine.")
                .removeprefix("Node.")
                .removeprefix("Device."),
                fix="python -c 'from milescli.platform.probe import probe; "
                "print(probe().to_json())'   # prints an example",
            ) from error
        machine.check(origin)
        return machine

    def check(self, origin: str) -> None:
        """Raise RecipeError if the parts contradict each other."""
        for part in (
            self,
            *self.nodes,
            *(device for node in self.nodes for device in node.devices),
        ):
            _check_types(part, origin)
        if self.kind not in ("cuda", "rocm", "cpu") or not self.nodes:
            raise RecipeError(
                f"{origin} does not describe a machine",
                why=f"kind is {self.kind!r} and there are {len(self.nodes)} nodes; kind must be "
                "cuda, rocm or cpu, and at least one node is needed",
                fix=f"set `kind` and `nodes` in {origin}",
            )
        if (self.kind == "cpu") == any(node.devices for node in self.nodes):
            raise RecipeError(
                f"{origin} contradicts itself",
                why=f"kind is {self.kind}, but {sum(len(node.devices) for node in self.nodes)} "
                "devices are listed",
                fix=f"set `kind` in {origin} to "
                f"{'cuda or rocm' if self.kind == 'cpu' else 'cpu, or list the devices'}",
            )


def _check_types(part: Machine | Node | Device, origin: str) -> None:
    """Check that numbers are numbers: a file may say `80GB`."""
    for item in fields(part):
        value = getattr(part, item.name)
        if item.type == "int" and (
            not isinstance(value, int) or isinstance(value, bool) or value < 0
        ):
            raise RecipeError(
                f"{origin}: {item.name} is not a number",
                why=f"it is `{value}`; bytes and counts must be whole numbers from 0; a memory "
                f"of 80 GiB is {80 * GIB}",
                fix=f"correct `{item.name}` in {origin}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceModel:
    """Describes a device model, as its maker sells it."""

    kind: Kind
    name: str
    """Name in the vendor's tool."""
    memory_gib: int
    """Memory in the vendor's tool, rounded down: less than the maker's GB in `sold_gb`."""
    sold_gb: int
    arch: str
    interconnect: Interconnect
    num_per_node: int = 8
    """Number in the usual server."""


def _device_model(
    kind: Kind,
    name: str,
    memory_gib: int,
    sold_gb: int,
    arch: str,
    link: Interconnect,
    per_node: int = 8,
) -> _DeviceModel:
    return _DeviceModel(
        kind=kind,
        name=name,
        memory_gib=memory_gib,
        sold_gb=sold_gb,
        arch=arch,
        interconnect=link,
        num_per_node=per_node,
    )


DEVICE_MODELS: dict[str, _DeviceModel] = {
    "A100": _device_model("cuda", "NVIDIA A100-SXM4-80GB", 80, 80, "sm_80", "nvlink"),
    "A100-40GB": _device_model("cuda", "NVIDIA A100-SXM4-40GB", 40, 40, "sm_80", "nvlink"),
    "L40S": _device_model("cuda", "NVIDIA L40S", 44, 48, "sm_89", "pcie"),
    "RTX4090": _device_model("cuda", "NVIDIA GeForce RTX 4090", 23, 24, "sm_89", "pcie"),
    "H100": _device_model("cuda", "NVIDIA H100 80GB HBM3", 79, 80, "sm_90", "nvlink"),
    "H200": _device_model("cuda", "NVIDIA H200", 140, 141, "sm_90", "nvlink"),
    "B200": _device_model("cuda", "NVIDIA B200", 179, 180, "sm_100", "nvlink"),
    "B300": _device_model("cuda", "NVIDIA B300 SXM6 AC", 268, 288, "sm_103", "nvlink"),
    "GB200": _device_model("cuda", "NVIDIA GB200", 185, 186, "sm_100", "nvlink", 4),
    "GB300": _device_model("cuda", "NVIDIA GB300", 277, 288, "sm_103", "nvlink", 4),
    "MI300X": _device_model("rocm", "AMD Instinct MI300X", 191, 192, "gfx942", "xgmi"),
    "MI325X": _device_model("rocm", "AMD Instinct MI325X", 255, 256, "gfx942", "xgmi"),
    "MI350X": _device_model("rocm", "AMD Instinct MI350X", 287, 288, "gfx950", "xgmi"),
    "MI355X": _device_model("rocm", "AMD Instinct MI355X", 287, 288, "gfx950", "xgmi"),
}
"""What `8xNAME` can say. Memory as nvidia-smi 580 shows it: A100 81920 and 40960 MiB, L40S 46068,
RTX 4090 24564, H100 81559, H200 143771, B200 183359, B300 275040, GB200 189471, GB300 284208; as
amd-smi 26 shows it: MI300X 196592 MB, MI325X 262128, MI350X and MI355X 294896."""

_SLOWER_VARIANTS = {"PCIE", "NVL", "MIG"}
"""Words in names of cards that share a model's name and are slower: H100 PCIe, H200 NVL, parts of a
device."""


def model_of(device: Device) -> str | None:
    """Return the name in DEVICE_MODELS of a device that the vendor's tool calls, for instance,
    `NVIDIA B300 SXM6 AC`; None if there is none. If the name fits several (A100), the memory
    decides."""
    words = re.split(r"[^A-Z0-9]+", device.name.upper().replace("RTX ", "RTX"))
    if _SLOWER_VARIANTS & set(words):
        return None
    fitting = [name for name in DEVICE_MODELS if name.partition("-")[0] in words]
    named_gb = {word for word in words if re.fullmatch(r"\d+GB", word)}
    if exact := [name for name in fitting if f"{DEVICE_MODELS[name].sold_gb}GB" in named_gb]:
        return exact[0]
    return min(
        fitting,
        key=lambda name: abs(DEVICE_MODELS[name].memory_gib * GIB - device.memory_bytes),
        default=None,
    )


_NAMED = re.compile(
    r"(?:(?:(?P<nodes>\d+)X)?(?P<devices>\d+)X)?(?P<model>[A-Z][A-Z0-9]*)(?P<rest>(?:-[A-Z0-9]+)*)"
)
_IGNORED_WORDS = {"SXM", "SXM4", "SXM5", "SXM6", "OAM", "HGX", "HBM3", "HBM3E", "HBM2E"}
"""Words after a model's name that every device of the model has."""


def parse_machine(text: str) -> Machine:
    """Parse `8xH200`, `16x8xMI355X` (nodes x devices), `H100`, `8xA100-40GB`, or `cpu`, in any
    case. Hosts are assumed to be typical: `64xGB300` means 16 trays of four.

    Raises MachineError for an unknown name.
    """
    match = _NAMED.fullmatch("".join(text.split()).upper().replace("\N{MULTIPLICATION SIGN}", "X"))
    if match and match["model"] == "CPU" and not match["rest"]:
        num_nodes = int(match["devices"] or 1)
        if not match["nodes"] and num_nodes:
            node = Node(cpu_cores=8, memory_bytes=32 * GIB, shm_bytes=16 * GIB)
            return Machine(kind="cpu", nodes=[node] * num_nodes)
    name = _known_model(match["model"], match["rest"].split("-")[1:]) if match else None
    num_nodes, num_devices = (
        (int(match["nodes"] or 1), int(match["devices"] or 1)) if match else (0, 0)
    )
    if match is None or name is None or not num_nodes or not num_devices:
        raise _unknown(text, match["model"] + match["rest"] if match else text, count=num_devices)
    model = DEVICE_MODELS[name]
    if not match["nodes"] and num_devices > model.num_per_node:
        num_nodes, left = divmod(num_devices, model.num_per_node)
        if left:
            raise MachineError(
                f"`{text}` is not a whole number of machines",
                why=f"{name} come {model.num_per_node} to a machine",
                fix=[
                    f"--on {num_nodes + 1}x{model.num_per_node}x{name}",
                    f"--on 1x{num_devices}x{name}   # one machine with that many",
                ],
            )
        num_devices = model.num_per_node
    return Machine(kind=model.kind, nodes=[_usual_node(model, num_devices)] * num_nodes)


def _usual_node(model: _DeviceModel, num_devices: int) -> Node:
    devices = [
        Device(index=index, name=model.name, memory_bytes=model.memory_gib * GIB, arch=model.arch)
        for index in range(num_devices)
    ]
    return Node(
        devices=devices,
        cpu_cores=12 * num_devices,
        memory_bytes=max(256, 2 * model.memory_gib * num_devices) * GIB,
        shm_bytes=128 * GIB,
        num_numa_nodes=2 if num_devices > 4 else 1,
        interconnect=model.interconnect if num_devices > 1 else "none",
    )


def _known_model(model: str, words: list[str]) -> str | None:
    """Find a model: A100, [SXM4, 40GB] -> A100-40GB. Returns None if a word contradicts every model
    of that name."""
    fitting = [name for name in DEVICE_MODELS if name.partition("-")[0] == model]
    for word in words:
        if word not in _IGNORED_WORDS:
            fitting = [name for name in fitting if word == f"{DEVICE_MODELS[name].sold_gb}GB"]
    return fitting[0] if fitting else None


def _unknown(text: str, wanted: str, *, count: int) -> MachineError:
    """Return the error, with the two nearest names and the same number of them."""
    near = (
        [name for name in DEVICE_MODELS if name.startswith(wanted.partition("-")[0])]
        if wanted
        else []
    )
    first = near[0] if near else nearest(wanted, DEVICE_MODELS) or "H200"
    second = next((name for name in near[1:]), None) or nearest(
        wanted, [name for name in DEVICE_MODELS if name != first]
    )
    return MachineError(
        f"`{text}` is not a machine that miles knows",
        why="it must have the form 8xH200 or 16x8xMI355X (nodes x devices x model), or be cpu; "
        f"the models are {', '.join(DEVICE_MODELS)}",
        fix=[f"--on {count or 8}x{name}" for name in (first, second) if name]
        + ["--on machine.yaml   # a file that describes the machine"],
    )


def read_machine(text: str) -> Machine:
    """Return the machine of a name as in `parse_machine`, or of a .json, .yaml or .yml file."""
    path = Path(text)
    if path.suffix not in (".json", ".yaml", ".yml"):
        return parse_machine(text)
    if not path.is_file():
        raise RecipeError(
            f"the file {path} does not exist",
            why="it should describe a machine",
            fix="--on 8xH200   # or name a machine",
        )
    try:
        described = read_regular_text(path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecipeError(
            f"the file {path} cannot be read",
            why=why or str(error),
            fix="--on 8xH200   # or name a machine",
        ) from None
    return Machine.from_text(described, origin=str(path))
