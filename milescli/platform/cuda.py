"""NVIDIA devices, from the output of nvidia-smi. Parsing only; `probe` runs the tool."""

from __future__ import annotations

import csv
import itertools
import re

from milescli.platform.machine import Device, Interconnect

QUERY = ("nvidia-smi", "--query-gpu=index,name,uuid,memory.total,compute_cap,driver_version", "--format=csv,noheader,nounits")
SUMMARY = ("nvidia-smi",)
"""Its header alone tells the CUDA version."""
TOPOLOGY = ("nvidia-smi", "topo", "-m")

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_CUDA_VERSION = re.compile(r"CUDA Version:\s*([\d.]+)")
_LINK = re.compile(r"NV\d+|X|PIX|PXB|PHB|NODE|SYS|C2C")


def parse_devices(text: str) -> tuple[list[Device], str]:
    """Devices and driver version from QUERY's lines. Lines that are no device (warnings of the tool) are passed over."""
    devices, driver = [], ""
    for fields in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(fields) != 6 or not fields[0].strip().isdigit():
            continue
        index, name, uuid, memory_mib, capability, driver = (each.strip() for each in fields)
        memory = int(memory_mib) * 1024**2 if memory_mib.isdigit() else 0  # [N/A] where memory is shared with the host
        devices.append(Device(index=int(index), name=name, memory_bytes=memory, arch=_arch(capability), uuid=uuid))
    return devices, driver


def parse_cuda_version(text: str) -> str:
    """The newest CUDA that the driver bears, or an empty text."""
    found = _CUDA_VERSION.search(text)
    return found[1] if found else ""


def parse_interconnect(text: str, *, indices: list[int]) -> Interconnect:
    """The slowest link between any two of the devices `indices`, from TOPOLOGY's matrix; pcie where it cannot be read."""
    if len(indices) < 2:
        return "none"
    links = parse_links(text)
    told = [links.get((a, b), "") for a, b in itertools.combinations(sorted(indices), 2)]
    return "nvlink" if all(link.startswith("NV") for link in told) else "pcie"


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """(a, b) with a < b -> NV18, C2C, PIX, PXB, PHB, NODE or SYS, from TOPOLOGY's matrix; where the two halves differ, the slower one."""
    rows: dict[int, list[str]] = {}
    for line in _ESCAPES.sub("", text).splitlines():
        cells = line.split()
        if cells and (found := re.fullmatch(r"GPU(\d+)", cells[0])) and len(cells) > 1 and _LINK.fullmatch(cells[1]):
            rows[int(found[1])] = cells[1:]
    order = sorted(rows)
    links: dict[tuple[int, int], str] = {}
    for (i, a), (j, b) in itertools.combinations(enumerate(order), 2):
        halves = [rows[one][place] for one, place in ((a, j), (b, i)) if place < len(rows[one])]
        if len(halves) == 2:
            links[a, b] = min(halves, key=lambda link: link.startswith("NV"))
    return links


def _arch(capability: str) -> str:
    """9.0 -> sm_90"""
    return f"sm_{capability.replace('.', '')}" if re.fullmatch(r"\d+\.\d+", capability) else ""
