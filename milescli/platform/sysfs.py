"""Finds devices as the kernel lists them: for containers that have the driver but not the vendor's
tool, or fewer devices than the tool lists. Reads /sys and /proc, and tests whether files may be
opened."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from milescli.core.units import GIB
from milescli.platform.machine import DEVICE_MODELS, Device, is_accelerator, model_of
from milescli.platform.rocm import NAMES, uuid_of

KFD = "sys/class/kfd/kfd/topology/nodes"
NVIDIA = "proc/driver/nvidia/gpus"
NVIDIA_VERSION = "proc/driver/nvidia/version"
AMD_VERSION = "sys/module/amdgpu/version"
_XGMI, _VRAM = 11, (1, 2)
"""Constants of the kernel's kfd_sysfs and hsakmttypes.h: io_link type; heap_type of memory banks
(frame buffer, public or private)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdView:
    """Holds the report of the driver amdkfd."""

    devices: list[Device]
    """Devices whose device file exists here, in the order in which HIP counts them."""
    files: list[Path]
    """[devices] /dev/dri/renderD128, ..."""
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    """Links as in `rocm.parse_links`."""
    num_absent: int = 0
    """Number of devices that the driver knows, but this container lacks."""


def find_amd(root: Path) -> AmdView:
    """Read AMD's devices; the result is empty without any. The kernel hides devices that belong to
    another container."""
    nodes = {int(path.name): path for path in (root / KFD).glob("[0-9]*")}
    properties = {number: _numbers(path / "properties") for number, path in nodes.items()}
    every = [number for number in sorted(nodes) if properties[number].get("gfx_target_version", 0)]
    files = {
        number: root / f"dev/dri/renderD{properties[number].get('drm_render_minor', 0)}"
        for number in every
    }
    here = [number for number in every if files[number].exists()]
    devices = []
    for index, number in enumerate(here):
        facts = properties[number]
        banks = [_numbers(path) for path in sorted(nodes[number].glob("mem_banks/*/properties"))]
        memory = sum(
            bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _VRAM
        )
        arch = gfx_name(facts["gfx_target_version"])
        name = NAMES.get(facts.get("device_id", 0), f"AMD {arch}")
        uuid = uuid_of(f"{facts.get('unique_id', 0):x}")
        devices.append(Device(index=index, name=name, memory_bytes=memory, arch=arch, uuid=uuid))
    links: dict[tuple[int, int], str] = {}
    for index, number in enumerate(here):
        for path in sorted(nodes[number].glob("io_links/*/properties")):
            link = _numbers(path)
            if link.get("node_to") in here:
                pair = sorted((index, here.index(link["node_to"])))
                links[pair[0], pair[1]] = "XGMI" if link.get("type") == _XGMI else "PCIE"
    for pair in itertools.combinations(range(len(here)), 2):
        links.setdefault(pair, "PCIE")
    return AmdView(
        devices=devices,
        files=[files[number] for number in here],
        links=links,
        num_absent=len(every) - len(here),
    )


def gfx_name(version: int) -> str:
    """Convert 90402 to gfx942: minor version and step have two decimal digits each here, and are
    hexadecimal in the name."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def find_nvidia(root: Path) -> tuple[list[Device], dict[int, str], str]:
    """Return the devices with a device file here, in the order of the PCI bus; the driver's
    messages about lost ones; and its version. Memory and architecture are those of the model if it
    is known."""
    devices, gone, index = [], {}, 0
    for path in sorted((root / NVIDIA).glob("*/information")):
        facts = dict(_pairs(path))
        if not (root / f"dev/nvidia{facts.get('Device Minor', index)}").exists():
            continue
        name = facts.get("Model", "")
        if name in ("", "Unknown"):
            gone[index] = f"Model: {name or 'none'}"
        else:
            device = Device(
                index=index, name=name, memory_bytes=0, arch="", uuid=facts.get("GPU UUID", "")
            )
            model = DEVICE_MODELS.get(model_of(device) or "")
            memory, arch = (model.memory_gib * GIB, model.arch) if model else (0, "")
            devices.append(
                Device(index=index, name=name, memory_bytes=memory, arch=arch, uuid=device.uuid)
            )
        index += 1
    return devices, gone, nvidia_version(root)


def nvidia_version(root: Path) -> str:
    """Return the version of the loaded driver; empty without one."""
    words = _text(root / NVIDIA_VERSION).split()
    return next((word for word in words if word[0].isdigit() and word.count(".") >= 1), "")


def amd_version(root: Path) -> str:
    """Return the version of the driver amdgpu if it is not the kernel's own."""
    return _text(root / AMD_VERSION).strip()


def has_nvidia(root: Path) -> bool:
    """Return True if nvidia-smi should work: the driver is loaded, or a GPU is on the bus. Images
    may contain the tool on any machine."""
    files = any((root / path).exists() for path in ("dev/nvidiactl", "dev/dxg"))
    return files or bool(nvidia_version(root)) or _on_bus(root, vendor="0x10de")


def has_amd(root: Path) -> bool:
    """Return True if AMD's compute driver is loaded. A graphics card does not count: its driver is
    loaded on every desktop, and creates this file too."""
    properties = [_numbers(path) for path in (root / KFD).glob("[0-9]*/properties")]
    versions = [
        facts["gfx_target_version"] for facts in properties if facts.get("gfx_target_version", 0)
    ]
    if versions:
        return any(
            is_accelerator(Device(index=0, name="", memory_bytes=0, arch=gfx_name(version)))
            for version in versions
        )
    return (root / "dev/kfd").exists()


def _on_bus(root: Path, *, vendor: str) -> bool:
    """Return True if a display controller (class 0x03) of this vendor is on the PCI bus."""
    devices = (root / "sys/bus/pci/devices").glob("*")
    return any(
        _text(path / "vendor").strip() == vendor and _text(path / "class").startswith("0x03")
        for path in devices
    )


def may_open(path: Path) -> bool:
    """Return True if this process may open the file to compute on the device."""
    return os.access(path, os.R_OK | os.W_OK)


def _pairs(path: Path) -> list[tuple[str, str]]:
    lines = [line.partition(":") for line in _text(path).splitlines()]
    return [(key.strip(), value.strip()) for key, _, value in lines]


def _numbers(path: Path) -> Mapping[str, int]:
    """Read lines of `name number`."""
    words = [line.split() for line in _text(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
