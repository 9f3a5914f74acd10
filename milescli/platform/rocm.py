"""Parses AMD devices from the JSON of amd-smi or, if it is missing, of rocm-smi; `probe` runs the
tools."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from milescli.platform.machine import DEVICE_MODELS, Device, Interconnect

AMD_STATIC = ("amd-smi", "static", "--asic", "--vram", "--driver", "--json")
AMD_TOPOLOGY = ("amd-smi", "topology", "--link-type", "--json")
ROCM_STATIC = (
    "rocm-smi",
    "--showproductname",
    "--showmeminfo",
    "vram",
    "--showdriverversion",
    "--showuniqueid",
    "--json",
)
ROCM_TOPOLOGY = ("rocm-smi", "--showtopotype", "--json")
VERSION_FILE = "opt/rocm/.info/version"

NAMES = {
    0x738C: "AMD Instinct MI100",
    0x7408: "AMD Instinct MI250X",
    0x740C: "AMD Instinct MI250X",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74B5: "AMD Instinct MI300X",
    0x74A2: "AMD Instinct MI308X",
    0x74A5: "AMD Instinct MI325X",
    0x74B9: "AMD Instinct MI325X",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}
"""PCI device -> name, including virtual functions (pci.ids). Older tools, and drivers in virtual
machines, show only a generic name."""

_UNITS = {"B": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3}
"""Bytes by unit; the tools write MB for 1024 * 1024."""
_MISSING = ("", "N/A", "None")


def parse_amd_smi(text: str) -> tuple[list[Device], str]:
    """Parse devices and driver version from AMD_STATIC; return nothing for unexpected text.

    ROCm 6.0 and 6.1 write `driver_version` and `vram_size_mb` instead of `version` and `size`, and
    omit the architecture."""
    devices, driver = [], ""
    for entry in _entries(text):
        asic, vram, driver_part = (entry.get(key) or {} for key in ("asic", "vram", "driver"))
        if not isinstance(entry.get("gpu"), int) or not isinstance(asic, dict):
            continue
        if isinstance(driver_part, dict):
            driver = _field(driver_part, "version", "driver_version") or driver
        name = _name(_field(asic, "market_name"), _field(asic, "device_id"))
        devices.append(
            Device(
                index=entry["gpu"],
                name=name,
                memory_bytes=_size(vram) if isinstance(vram, dict) else 0,
                arch=_arch(_field(asic, "target_graphics_version")) or _arch_of_name(name),
                uuid=uuid_of(_field(asic, "asic_serial")),
            )
        )
    return devices, driver


def parse_rocm_smi(text: str) -> tuple[list[Device], str]:
    """Parse devices and driver version from ROCM_STATIC; return nothing for unexpected text."""
    raw = _json(text)
    if not isinstance(raw, dict):
        return [], ""
    devices = []
    for key, card in raw.items():
        match = re.fullmatch(r"card(\d+)", key)
        if not match or not isinstance(card, dict):
            continue
        memory = _field(card, "VRAM Total Memory (B)")
        number = _field(card, "Card Model", "Card model", "Device ID", "GPU ID")
        name = _name(_field(card, "Card Series", "Card series", "Device Name"), number)
        devices.append(
            Device(
                index=int(match[1]),
                name=name,
                memory_bytes=int(memory) if memory.isdigit() else 0,
                arch=_arch(_field(card, "GFX Version")) or _arch_of_name(name),
                uuid=uuid_of(_field(card, "Unique ID")),
            )
        )
    system = raw.get("system")
    driver = _field(system, "Driver version") if isinstance(system, dict) else ""
    return sorted(devices, key=lambda device: device.index), driver


def slowest_link(links: Mapping[tuple[int, int], str], *, indices: list[int]) -> Interconnect:
    """Return the slowest link of any two of the devices; pcie if one is unknown."""
    if len(indices) < 2:
        return "none"
    return (
        "xgmi"
        if all(links.get(pair) == "XGMI" for pair in itertools.combinations(sorted(indices), 2))
        else "pcie"
    )


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Map (a, b) with a < b to XGMI or PCIE, from either tool's topology; if the two directions
    differ, the slower one counts."""
    links: dict[tuple[int, int], str] = {}
    for (a, b), link in (_amd_links(text) or _rocm_links(text)).items():
        pair = (min(a, b), max(a, b))
        if a != b:
            links[pair] = link if links.get(pair, "XGMI") == "XGMI" else links[pair]
    return links


def _amd_links(text: str) -> dict[tuple[int, int], str]:
    """Return the links from a list per device; before ROCm 6.2 it is an object, {"gpu_1":
    "XGMI"}."""
    links = {}
    for entry in _entries(text):
        if not isinstance(entry.get("gpu"), int):
            continue
        for link in entry.get("links") or []:
            if isinstance(link, dict) and isinstance(link.get("gpu"), int):
                links[entry["gpu"], link["gpu"]] = str(link.get("link_type", ""))
        older = entry.get("link_type")
        for key, value in older.items() if isinstance(older, dict) else ():
            if match := re.fullmatch(r"gpu_(\d+)", key):
                links[entry["gpu"], int(match[1])] = str(value)
    return links


def _rocm_links(text: str) -> dict[tuple[int, int], str]:
    raw = _json(text)
    system = raw.get("system") if isinstance(raw, dict) else None
    links = {}
    for key, value in (system or {}).items():
        match = re.search(r"devices (\d+) and (\d+)", key)
        if match:
            links[int(match[1]), int(match[2])] = str(value)
    return links


def _entries(text: str) -> list[dict[str, Any]]:
    """Return the entries of amd-smi's list, which newer versions put into an object."""
    raw = _json(text)
    if isinstance(raw, dict):
        raw = raw.get("gpu_data", [])
    return [entry for entry in raw if isinstance(entry, dict)] if isinstance(raw, list) else []


def _json(text: str) -> Any:
    """Return the JSON in a tool's output, which warnings may precede; None if there is none."""
    starts = [place for place in (text.find("{"), text.find("[")) if place >= 0]
    if not starts:
        return None
    for start in sorted(starts):
        try:
            return json.JSONDecoder().raw_decode(text[start:])[0]
        except json.JSONDecodeError:
            continue
    return None


def uuid_of(serial: str) -> str:
    """Convert 0xA1B2 to GPU-000000000000a1b2, the form that HIP writes and its variables accept;
    empty if unknown."""
    try:
        number = int(serial, 16)
    except ValueError:
        return ""
    return f"GPU-{number:016x}" if number else ""


def _field(part: dict[str, Any], *keys: str) -> str:
    """Return the first of these fields that has a value."""
    return next(
        (str(part[key]) for key in keys if key in part and str(part[key]) not in _MISSING), ""
    )


def _name(shown: str, number: str) -> str:
    """Return the name by the PCI device if it is known: `Aqua Vanjaram [Instinct MI300X]` and `AMD
    Radeon Graphics` are shown for the same."""
    try:
        return NAMES.get(int(number, 16), shown)
    except ValueError:
        return shown


def _size(vram: dict[str, Any]) -> int:
    size = next(
        (vram[key] for key in ("size", "vram_size", "vram_size_mb", "size_mb") if key in vram), None
    )
    if isinstance(size, int):
        return size * _UNITS["MB"]
    if isinstance(size, dict) and isinstance(size.get("value"), int) and size.get("unit") in _UNITS:
        return size["value"] * _UNITS[size["unit"]]
    return 0


def _arch(text: str) -> str:
    """Convert gfx942:sramecc+:xnack- to gfx942. rocm-smi of ROCm 6.0 writes the last part in
    decimal: gfx9010."""
    match = re.match(r"gfx[0-9a-f]+", text.lower())
    return _DECIMAL.get(match[0], match[0]) if match else ""


_DECIMAL = {"gfx9010": "gfx90a"}


def _arch_of_name(name: str) -> str:
    return next((model.arch for model in DEVICE_MODELS.values() if model.name == name), "")
