"""Detects this computer's devices without torch: runs the vendors' tools with time limits, and
reads the kernel's lists. The one impure file of this package."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from milescli.core.errors import MachineError
from milescli.core.units import GIB
from milescli.platform import cuda, faults, rocm, sysfs
from milescli.platform.cpu import HostFacts, read_host
from milescli.platform.faults import DeviceFault
from milescli.platform.machine import (
    DEVICE_MODELS,
    Device,
    Interconnect,
    Kind,
    Machine,
    Node,
    is_accelerator,
    model_of,
)
from milescli.platform.visibility import set_variables, visible_devices

TOOL_TIMEOUT_S = 20.0
"""Time limit of a tool; nvidia-smi takes seconds if the driver is not kept loaded."""
TOOL_FOLDERS = ("/opt/rocm/bin", "/usr/lib/wsl/lib")
"""Folders that are searched after PATH: ROCm's packages and WSL put their tools there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReply:
    """Holds the reply of a vendor's tool."""

    text: str
    """Standard output, also of a tool that failed midway; empty if it could not run."""
    problem: str = ""
    """How it failed; empty if it did not, or if it is not installed, which is no problem."""


RunTool = Callable[[Sequence[str]], ToolReply]
MayOpen = Callable[[Path], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """Holds everything that tools and kernel report, before visibility variables apply."""

    kind: Kind
    devices: list[Device]
    interconnect: Interconnect = "none"
    driver_version: str = ""
    runtime_version: str = ""
    notes: list[str]
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    """(a, b) with a < b, indices of devices -> NV18, PIX, SYS; XGMI, PCIE. Omits what the tool does
    not report."""
    faults: list[DeviceFault] = field(default_factory=list)
    """Devices that exist but cannot be used."""


def probe(
    *,
    run: RunTool | None = None,
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    host: HostFacts | None = None,
    may_open: MayOpen = sysfs.may_open,
) -> Machine:
    """Describe this computer as a Machine of one node, with the devices that the visibility
    variables leave.

    The arguments are for tests. Raises MachineError if those variables contradict each other or the
    machine, or leave a device that is not usable: running on fewer devices, or on the CPU, must be
    an explicit decision."""
    environ = os.environ if environ is None else environ
    host = host or read_host(root=root)
    accelerators = find_accelerators(run or run_tool, root=root, may_open=may_open)
    if errors := fault_errors(accelerators, environ):
        raise errors[0]
    visible = visible_devices(accelerators.kind, accelerators.devices, environ)
    devices = [
        _with_memory(device, host, share=len(visible))
        for device in visible
        if is_accelerator(device)
    ]
    notes = list(accelerators.notes)
    if accelerators.devices and not visible:
        there = f"{len(accelerators.devices)} {accelerators.kind} devices"
        notes.append(f"{there} are there, and none is visible")
    if visible and not devices:
        notes.append(
            f"{visible[0].name} ({visible[0].arch}) is no GPU that SGLang and Megatron-Core "
            "compute on: the CPU is used"
        )
    return Machine(
        kind=accelerators.kind if devices else "cpu",
        nodes=[_node(host, devices, accelerators.interconnect)],
        driver_version=accelerators.driver_version,
        runtime_version=accelerators.runtime_version,
        visibility=set_variables(environ),
        notes=notes,
    )


def fault_errors(accelerators: Accelerators, environ: Mapping[str, str]) -> list[MachineError]:
    """Return what must be repaired or hidden before the devices that `environ` leaves are
    usable."""
    return [fault.error for fault in accelerators.faults if fault.concerns(environ)]


def find_accelerators(
    run: RunTool, *, root: Path = Path("/"), may_open: MayOpen = sysfs.may_open
) -> Accelerators:
    """Return what tools and kernel report, NVIDIA first."""
    nvidia = _find_nvidia(run, root)
    if nvidia.devices or nvidia.faults:
        return nvidia
    amd = _find_amd(run, root, may_open)
    return replace(amd, notes=nvidia.notes + amd.notes)


def run_tool(command: Sequence[str]) -> ToolReply:
    """Run a tool with a time limit. Never raises: a machine without the tool is valid."""
    tool = shutil.which(
        command[0], path=os.pathsep.join([os.environ.get("PATH", os.defpath), *TOOL_FOLDERS])
    )
    if tool is None:
        return ToolReply(text="")
    try:
        done = subprocess.run(
            [tool, *command[1:]],
            capture_output=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return ToolReply(
            text="", problem=f"`{' '.join(command)}` did not answer within {TOOL_TIMEOUT_S:.0f} s"
        )
    except OSError as error:
        return ToolReply(text="", problem=f"`{' '.join(command)}` could not be run: {error}")
    text = done.stdout.decode("utf-8", errors="replace")
    if done.returncode == 0:
        return ToolReply(text=text)
    lines = (done.stderr.decode("utf-8", errors="replace").strip() or text.strip()).splitlines()
    # Python's tools end with the error, the others begin with it
    line = next(
        (line for line in reversed(lines) if "Error:" in line), lines[0] if lines else "no message"
    )
    return ToolReply(
        text=text, problem=f"`{' '.join(command)}` ended with {done.returncode}: {line}"
    )


def _find_nvidia(run: RunTool, root: Path) -> Accelerators:
    reply = run(cuda.QUERY)
    listed, driver = cuda.parse_devices(reply.text)
    gone = cuda.parse_lost(reply.text)
    if not listed and not gone:
        return _nvidia_without_list(reply, root)
    summary = run(cuda.SUMMARY).text
    cut = [device for device in listed if device.index in cuda.parse_mig_indices(reply.text)]
    parts = cuda.parse_instances(run(cuda.INSTANCES).text, summary, cut) if cut else []
    devices = [device for device in listed if device not in cut] + parts
    indices = [device.index for device in devices]
    topology = run(cuda.TOPOLOGY).text if len(indices) > 1 else ""
    broken = [
        faults.lost_device("cuda", index, words, others=indices) for index, words in gone.items()
    ]
    if reply.problem and not broken:
        broken = [
            DeviceFault(kind="cuda", indices=(), error=faults.tool_error("cuda", reply.problem))
        ]
    return Accelerators(
        kind="cuda" if devices else "cpu",
        devices=devices,
        interconnect=cuda.parse_interconnect(topology, indices=indices),
        links=cuda.parse_links(topology),
        driver_version=driver,
        runtime_version=cuda.parse_cuda_version(summary),
        notes=[reply.problem] if reply.problem else [],
        faults=broken,
    )


def _nvidia_without_list(reply: ToolReply, root: Path) -> Accelerators:
    """Find NVIDIA devices if nvidia-smi is missing or lists none. Its own failure is more precise
    than the kernel's list: the driver may not fit its libraries."""
    problem = reply.problem or (
        f"`nvidia-smi` says: {reply.text.strip().splitlines()[0]}" if reply.text.strip() else ""
    )
    if problem:
        broken = DeviceFault(kind="cuda", indices=None, error=faults.tool_error("cuda", problem))
        return Accelerators(
            kind="cpu",
            devices=[],
            notes=[problem],
            faults=[broken] if sysfs.has_nvidia(root) else [],
        )
    devices, gone, driver = sysfs.find_nvidia(root)
    lost_devices = [
        faults.lost_device("cuda", index, words, others=[device.index for device in devices])
        for index, words in gone.items()
    ]
    note = "nvidia-smi is missing: devices are as the driver lists them, links are unknown"
    return Accelerators(
        kind="cuda" if devices else "cpu",
        devices=devices,
        interconnect="pcie" if len(devices) > 1 else "none",
        driver_version=driver,
        notes=[note] if devices else [],
        faults=lost_devices,
    )


def _find_amd(run: RunTool, root: Path, may_open: MayOpen) -> Accelerators:
    """Find AMD devices: the kernel knows which ones are here and may be opened; the tools know
    names and links."""
    view = sysfs.find_amd(root)
    reply, topology = run(rocm.AMD_STATIC), rocm.AMD_TOPOLOGY
    devices, driver = rocm.parse_amd_smi(reply.text)
    if not devices:
        older, topology = run(rocm.ROCM_STATIC), rocm.ROCM_TOPOLOGY
        devices, driver = rocm.parse_rocm_smi(older.text)
        reply = reply if reply.problem else older
    notes = [reply.problem] if reply.problem else []
    if not devices and reply.problem and not faults.is_permission(reply.problem):
        broken = DeviceFault(
            kind="rocm", indices=None, error=faults.tool_error("rocm", reply.problem)
        )
        return Accelerators(
            kind="cpu", devices=[], notes=notes, faults=[broken] if sysfs.has_amd(root) else []
        )
    if view.devices and len(view.devices) != len(devices):
        absent = f": {view.num_absent} more are not in this container" if view.num_absent else ""
        notes.append(
            f"devices are as the kernel lists them{absent}"
            if devices
            else "neither amd-smi nor rocm-smi lists devices: they are as the kernel lists them"
        )
        devices, links = view.devices, view.links
    else:
        links = rocm.parse_links(run(topology).text) if len(devices) > 1 else {}
    version = root / rocm.VERSION_FILE
    return Accelerators(
        kind="rocm" if devices else "cpu",
        devices=devices,
        interconnect=rocm.slowest_link(links, indices=[device.index for device in devices]),
        links=links,
        driver_version=driver or sysfs.amd_version(root),
        runtime_version=version.read_text(encoding="utf-8").strip() if version.is_file() else "",
        notes=notes,
        faults=_closed_files(root, view, devices, may_open),
    )


def _closed_files(
    root: Path, view: sysfs.AmdView, devices: Sequence[Device], may_open: MayOpen
) -> list[DeviceFault]:
    """List AMD device files that do not exist or that this process may not open."""
    kfd = root / "dev/kfd"
    if not any(map(is_accelerator, [*devices, *view.devices])):
        return []  # a graphics card, which would not be used
    if devices and not kfd.exists():
        return [faults.missing_device_file(kfd, num_devices=len(devices))]
    if devices and view.num_absent and not view.devices:
        return [faults.missing_device_file(root / "dev/dri/renderD*", num_devices=len(devices))]
    if kfd.exists() and not may_open(kfd) and (devices or view.devices):
        return [faults.inaccessible_files([kfd], None)]
    closed = [(index, path) for index, path in enumerate(view.files) if not may_open(path)]
    return (
        [
            faults.inaccessible_files(
                [path for _, path in closed], tuple(index for index, _ in closed)
            )
        ]
        if closed
        else []
    )


def _with_memory(device: Device, host: HostFacts, *, share: int) -> Device:
    """Fill in memory that the tool does not report: that of the device's model, else (GB10) the
    host's, which CUDA also reports, divided among `share` devices."""
    if device.memory_bytes:
        return device
    model = model_of(device)
    return replace(
        device,
        memory_bytes=DEVICE_MODELS[model].memory_gib * GIB if model else host.memory_bytes // share,
    )


def _node(host: HostFacts, devices: list[Device], interconnect: Interconnect) -> Node:
    return Node(
        devices=devices,
        cpu_cores=host.cpu_cores,
        memory_bytes=host.memory_bytes,
        available_bytes=host.available_bytes,
        shm_bytes=host.shm_bytes,
        num_numa_nodes=host.num_numa_nodes,
        interconnect=interconnect if len(devices) > 1 else "none",
    )
