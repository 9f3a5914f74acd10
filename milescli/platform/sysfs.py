"""Devices as the kernel tells them, for machines (containers, mostly) that have the driver and not the vendor's tool. Reads /sys and /proc only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from milescli.core.units import GIB
from milescli.platform.machine import DEVICE_MODELS, Device

KFD = "sys/class/kfd/kfd/topology/nodes"
NVIDIA = "proc/driver/nvidia/gpus"
_XGMI, _VRAM = 11, (1, 2)
"""Of the kernel's kfd_sysfs and hsakmttypes.h: io_link type; heap_type of memory banks (frame buffer, public or private)."""


def find_amd(root: Path) -> tuple[list[Device], dict[tuple[int, int], str]]:
    """Devices in the order in which HIP counts them, and links of pairs. Names are not told there: the arch stands in."""
    nodes = {int(path.name): path for path in (root / KFD).glob("[0-9]*")}
    gpus = [number for number in sorted(nodes) if _numbers(nodes[number] / "properties").get("gfx_target_version", 0)]
    devices = []
    for index, number in enumerate(gpus):
        facts = _numbers(nodes[number] / "properties")
        banks = [_numbers(path) for path in sorted(nodes[number].glob("mem_banks/*/properties"))]
        memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _VRAM)
        arch = gfx_name(facts["gfx_target_version"])
        devices.append(
            Device(index=index, name=f"AMD {arch}", memory_bytes=memory, arch=arch, uuid=f"{facts.get('unique_id', 0):#x}")
        )
    links: dict[tuple[int, int], str] = {}
    for index, number in enumerate(gpus):
        for path in sorted(nodes[number].glob("io_links/*/properties")):
            link = _numbers(path)
            if link.get("node_to") in gpus:
                pair = sorted((index, gpus.index(link["node_to"])))
                links[pair[0], pair[1]] = "XGMI" if link.get("type") == _XGMI else "PCIE"
    for pair in itertools.combinations(range(len(gpus)), 2):
        links.setdefault(pair, "PCIE")
    return devices, links


def gfx_name(version: int) -> str:
    """90402 -> gfx942: two decimal digits each of minor and step, which the name has in hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def find_nvidia(root: Path) -> tuple[list[Device], str]:
    """Devices in the order of the PCI bus, and the driver's version. Memory and arch are those of the model, where it is known."""
    devices = []
    for index, path in enumerate(sorted((root / NVIDIA).glob("*/information"))):
        facts = dict(_pairs(path))
        name = facts.get("Model", "")
        model = max(
            (each for each in DEVICE_MODELS.values() if name and each.name.startswith(name)), key=lambda m: m.name, default=None
        )
        memory, arch = (model.memory_gib * GIB, model.arch) if model else (0, "")
        devices.append(Device(index=index, name=name, memory_bytes=memory, arch=arch, uuid=facts.get("GPU UUID", "")))
    words = _text(root / "proc/driver/nvidia/version").split()
    version = next((word for word in words if word[0].isdigit() and word.count(".") >= 1), "")
    return devices, version


def _pairs(path: Path) -> list[tuple[str, str]]:
    lines = [line.partition(":") for line in _text(path).splitlines()]
    return [(key.strip(), value.strip()) for key, _, value in lines]


def _numbers(path: Path) -> Mapping[str, int]:
    """`name number` on each line."""
    words = [line.split() for line in _text(path).splitlines()]
    return {each[0]: int(each[1]) for each in words if len(each) == 2 and each[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
