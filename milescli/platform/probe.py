"""Finds out what this computer has, without torch: asks the vendors' tools, each for a bounded time. The one impure file of this room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from milescli.platform import cuda, rocm, sysfs
from milescli.platform.cpu import HostFacts, read_host
from milescli.platform.machine import Device, Interconnect, Kind, Machine, Node
from milescli.platform.visibility import set_variables, visible_devices

TOOL_TIMEOUT_S = 20.0
"""nvidia-smi takes seconds where the driver is not kept loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReply:
    """What a vendor's tool said."""

    text: str
    """Standard output; empty where it could not be had."""
    problem: str = ""
    """Why not; empty where the tool is not installed, which is no problem."""


RunTool = Callable[[Sequence[str]], ToolReply]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """All that the vendors' tools found, before visibility."""

    kind: Kind
    devices: list[Device]
    interconnect: Interconnect = "none"
    driver_version: str = ""
    runtime_version: str = ""
    notes: list[str]
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    """(a, b) with a < b, indices of devices -> NV18, PIX, SYS; XGMI, PCIE. What the tool does not tell is left out."""


def probe(
    *,
    run: RunTool | None = None,
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    host: HostFacts | None = None,
) -> Machine:
    """This computer as a Machine of one node, with the devices that the visibility variables leave.

    The arguments are for tests. Raises MachineError where those variables contradict each other or the machine.
    """
    environ = os.environ if environ is None else environ
    host = host or read_host(root=root)
    found = find_accelerators(run or run_tool, root=root)
    devices = visible_devices(found.kind, found.devices, environ)
    notes = list(found.notes)
    if found.devices and not devices:
        notes.append(f"{len(found.devices)} {found.kind} devices are there, and none is visible")
    node = Node(
        devices=devices,
        cpu_cores=host.cpu_cores,
        memory_bytes=host.memory_bytes,
        shm_bytes=host.shm_bytes,
        num_numa_nodes=host.num_numa_nodes,
        interconnect=found.interconnect if len(devices) > 1 else "none",
    )
    return Machine(
        kind=found.kind if devices else "cpu",
        nodes=[node],
        driver_version=found.driver_version,
        runtime_version=found.runtime_version,
        visibility=set_variables(environ),
        notes=notes,
    )


def find_accelerators(run: RunTool, *, root: Path = Path("/")) -> Accelerators:
    """What the vendors' tools see, NVIDIA first; without them, what the kernel tells."""
    notes: list[str] = []
    for find in (_find_cuda, _find_rocm):
        found = find(run, root, notes)
        if found is not None:
            return found
    # A tool that is there and fails knows better than the kernel: the driver may not fit its libraries.
    by_kernel = None if notes else _find_in_kernel(root, notes)
    if by_kernel is not None:
        return by_kernel
    if (root / "dev/nvidiactl").exists() or (root / "dev/kfd").exists():
        notes.append("a driver of NVIDIA or AMD is loaded, but its tool (nvidia-smi, amd-smi, rocm-smi) lists no device")
    return Accelerators(kind="cpu", devices=[], notes=notes)


def _find_in_kernel(root: Path, notes: list[str]) -> Accelerators | None:
    """Where the tools are not installed, what the kernel's drivers tell. Only devices that this computer lets us open count."""
    devices, driver = sysfs.find_nvidia(root)
    if devices and (root / "dev/nvidiactl").exists():
        notes.append("nvidia-smi is not there: devices are as the driver tells them, links are not known")
        link: Interconnect = "pcie" if len(devices) > 1 else "none"
        return Accelerators(kind="cuda", devices=devices, interconnect=link, driver_version=driver, notes=notes)
    devices, links = sysfs.find_amd(root)
    if not devices or not (root / "dev/kfd").exists():
        return None
    notes.append("neither amd-smi nor rocm-smi is there: devices are as the kernel tells them")
    slowest: Interconnect = "none" if not links else "xgmi" if set(links.values()) == {"XGMI"} else "pcie"
    version = root / rocm.VERSION_FILE
    return Accelerators(
        kind="rocm",
        devices=devices,
        interconnect=slowest,
        links=links,
        runtime_version=version.read_text(encoding="utf-8").strip() if version.is_file() else "",
        notes=notes,
    )


def run_tool(command: Sequence[str]) -> ToolReply:
    """Run a tool, bounded. Never raises: a machine without it is as good as any."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=TOOL_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return ToolReply(text="")
    except subprocess.TimeoutExpired:
        return ToolReply(text="", problem=f"`{' '.join(command)}` did not answer within {TOOL_TIMEOUT_S:.0f} s")
    except OSError as error:
        return ToolReply(text="", problem=f"`{' '.join(command)}` could not be run: {error}")
    text = done.stdout.decode("utf-8", errors="replace")
    if done.returncode == 0:
        return ToolReply(text=text)
    told = (done.stderr.decode("utf-8", errors="replace").strip() or text.strip()).splitlines()
    return ToolReply(
        text="", problem=f"`{' '.join(command)}` ended with {done.returncode}: {told[0] if told else 'no message'}"
    )


def _find_cuda(run: RunTool, root: Path, notes: list[str]) -> Accelerators | None:
    devices, driver = cuda.parse_devices(_ask(run, cuda.QUERY, notes))
    if not devices:
        return None
    indices = [device.index for device in devices]
    topology = _ask(run, cuda.TOPOLOGY, notes) if len(indices) > 1 else ""
    return Accelerators(
        kind="cuda",
        devices=devices,
        interconnect=cuda.parse_interconnect(topology, indices=indices),
        links=cuda.parse_links(topology),
        driver_version=driver,
        runtime_version=cuda.parse_cuda_version(_ask(run, cuda.SUMMARY, notes)),
        notes=notes,
    )


def _find_rocm(run: RunTool, root: Path, notes: list[str]) -> Accelerators | None:
    topology = rocm.AMD_TOPOLOGY
    devices, driver = rocm.parse_amd_smi(_ask(run, rocm.AMD_STATIC, notes))
    if not devices:
        topology = rocm.ROCM_TOPOLOGY
        devices, driver = rocm.parse_rocm_smi(_ask(run, rocm.ROCM_STATIC, notes))
    if not devices:
        return None
    indices = [device.index for device in devices]
    links = _ask(run, topology, notes) if len(indices) > 1 else ""
    version = root / rocm.VERSION_FILE
    return Accelerators(
        kind="rocm",
        devices=devices,
        interconnect=rocm.parse_interconnect(links, indices=indices),
        links=rocm.parse_links(links),
        driver_version=driver,
        runtime_version=version.read_text(encoding="utf-8").strip() if version.is_file() else "",
        notes=notes,
    )


def _ask(run: RunTool, command: Sequence[str], notes: list[str]) -> str:
    reply = run(command)
    if reply.problem:
        notes.append(reply.problem)
    return reply.text
