"""Parses NVIDIA devices from the output of nvidia-smi; `probe` runs the tool."""

from __future__ import annotations

import csv
import itertools
import re
from dataclasses import replace

from milescli.platform.machine import Device, Interconnect

_FIELDS = "index,name,uuid,memory.total,compute_cap,driver_version,mig.mode.current"
QUERY = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
INSTANCES = ("nvidia-smi", "-L")
SUMMARY = ("nvidia-smi",)
"""Command whose header alone has the CUDA version, and whose last table has the memory of
instances."""
TOPOLOGY = ("nvidia-smi", "topo", "-m")

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_CUDA_VERSION = re.compile(r"CUDA Version:\s*([\d.]+)")
_LOST = re.compile(r"\[(?:GPU is lost|GPU requires reset|Unknown Error)\]|ERR!|\?\?")
_INSTANCE = re.compile(
    r"MIG (?P<profile>\S+)\s+Device\s+(?P<place>\d+): \(UUID: (?P<uuid>MIG-\S+)\)"
)
_INSTANCE_MEMORY = re.compile(r"^\|\s+(\d+)\s+\S+\s+\S+\s+(\d+)\s+\|\s+\d+MiB\s*/\s*(\d+)MiB", re.M)
_LINK = re.compile(r"NV\d+|X|PIX|PXB|PHB|NODE|SYS|C2C")


def parse_devices(text: str) -> tuple[list[Device], str]:
    """Parse devices and driver version from QUERY's lines. Skips warnings of the tool and lost
    devices."""
    devices, driver = [], ""
    for fields in _rows(text):
        if _loss_message(fields):
            continue
        index, name, uuid, memory_mib, capability, driver, _ = fields
        memory = (
            int(memory_mib) * 1024**2 if memory_mib.isdigit() else 0
        )  # [N/A] where memory is shared with the host
        devices.append(
            Device(
                index=int(index), name=name, memory_bytes=memory, arch=_arch(capability), uuid=uuid
            )
        )
    return devices, driver


def parse_lost(text: str) -> dict[int, str]:
    """Map the index of each device that does not respond to QUERY's message."""
    return {int(fields[0]): words for fields in _rows(text) if (words := _loss_message(fields))}


def parse_mig_indices(text: str) -> set[int]:
    """Return the indices of the GPUs that are split into MIG instances, from QUERY."""
    return {int(fields[0]) for fields in _rows(text) if fields[6] == "Enabled"}


def parse_instances(listing: str, summary: str, whole: list[Device]) -> list[Device]:
    """Return the instances that INSTANCES lists of the devices `whole`, with their indices. Memory
    comes from SUMMARY, or approximately from the profile's name (3g.40gb)."""
    memory_mib = {
        (int(gpu), int(place)): int(mib) for gpu, place, mib in _INSTANCE_MEMORY.findall(summary)
    }
    parents = {device.index: device for device in whole}
    parent, instances = None, []
    for line in listing.splitlines():
        if start := re.match(r"GPU (\d+):", line):
            parent = parents.get(int(start[1]))
        instance = _INSTANCE.search(line)
        if instance is None or parent is None:
            continue
        mib = memory_mib.get((parent.index, int(instance["place"])))
        promised = re.search(r"(\d+)gb", instance["profile"])
        memory = mib * 1024**2 if mib else int(promised[1]) * 10**9 if promised else 0
        name = f"{parent.name} MIG {instance['profile']}"
        instances.append(replace(parent, name=name, memory_bytes=memory, uuid=instance["uuid"]))
    return instances


def _rows(text: str) -> list[list[str]]:
    """Return QUERY's lines that are about a device."""
    rows = [
        [field.strip() for field in fields]
        for fields in csv.reader(text.splitlines(), skipinitialspace=True)
    ]
    return [
        fields for fields in rows if len(fields) == len(_FIELDS.split(",")) and fields[0].isdigit()
    ]


def _loss_message(fields: list[str]) -> str:
    """Return which of name, UUID, memory and capability is missing; empty if none is."""
    return next((field for field in fields[1:5] if _LOST.search(field)), "")


def parse_cuda_version(text: str) -> str:
    """Return the newest CUDA version that the driver supports, or an empty text."""
    match = _CUDA_VERSION.search(text)
    return match[1] if match else ""


def parse_interconnect(text: str, *, indices: list[int]) -> Interconnect:
    """Return the slowest link between any two of the devices `indices`, from TOPOLOGY's matrix;
    pcie if it is unreadable."""
    if len(indices) < 2:
        return "none"
    links = parse_links(text)
    kinds = [links.get((a, b), "") for a, b in itertools.combinations(sorted(indices), 2)]
    return "nvlink" if all(link.startswith("NV") for link in kinds) else "pcie"


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Map (a, b) with a < b to NV18, C2C, PIX, PXB, PHB, NODE or SYS, from TOPOLOGY's matrix; if
    the two halves differ, the slower one counts."""
    rows: dict[int, list[str]] = {}
    for line in _ESCAPES.sub("", text).splitlines():
        cells = line.split()
        if (
            cells
            and (head := re.fullmatch(r"GPU(\d+)", cells[0]))
            and len(cells) > 1
            and _LINK.fullmatch(cells[1])
        ):
            rows[int(head[1])] = cells[1:]
    order = sorted(rows)
    links: dict[tuple[int, int], str] = {}
    for (i, a), (j, b) in itertools.combinations(enumerate(order), 2):
        halves = [rows[one][place] for one, place in ((a, j), (b, i)) if place < len(rows[one])]
        if len(halves) == 2:
            links[a, b] = min(halves, key=lambda link: link.startswith("NV"))
    return links


def _arch(capability: str) -> str:
    """Convert 9.0 to sm_90."""
    return f"sm_{capability.replace('.', '')}" if re.fullmatch(r"\d+\.\d+", capability) else ""
