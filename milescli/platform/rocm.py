"""AMD devices, from the JSON of amd-smi or, where it is absent, of rocm-smi. Parsing only; `probe` runs the tools."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from milescli.platform.machine import Device, Interconnect

AMD_STATIC = ("amd-smi", "static", "--asic", "--vram", "--driver", "--json")
AMD_TOPOLOGY = ("amd-smi", "topology", "--link-type", "--json")
ROCM_STATIC = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--showuniqueid", "--json")
ROCM_TOPOLOGY = ("rocm-smi", "--showtopotype", "--json")
VERSION_FILE = "opt/rocm/.info/version"

_UNITS = {"B": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3}
"""The tools write MB and mean 1024 * 1024."""


def parse_amd_smi(text: str) -> tuple[list[Device], str]:
    """Devices and driver version from AMD_STATIC; nothing where the text is not what it should be."""
    devices, driver = [], ""
    for entry in _entries(text):
        asic, vram, driver_part = (entry.get(key) or {} for key in ("asic", "vram", "driver"))
        if not isinstance(entry.get("gpu"), int) or not isinstance(asic, dict):
            continue
        size = vram.get("size") if isinstance(vram, dict) else None
        driver = str(driver_part.get("version", "")) if isinstance(driver_part, dict) else ""
        devices.append(
            Device(
                index=entry["gpu"],
                name=str(asic.get("market_name", "")),
                memory_bytes=_size(size),
                arch=_arch(str(asic.get("target_graphics_version", ""))),
                uuid=str(asic.get("asic_serial", "")),
            )
        )
    return devices, driver


def parse_rocm_smi(text: str) -> tuple[list[Device], str]:
    """Devices and driver version from ROCM_STATIC; nothing where the text is not what it should be."""
    raw = _json(text)
    if not isinstance(raw, dict):
        return [], ""
    devices = []
    for key, card in raw.items():
        found = re.fullmatch(r"card(\d+)", key)
        if not found or not isinstance(card, dict):
            continue
        memory = str(card.get("VRAM Total Memory (B)", ""))
        devices.append(
            Device(
                index=int(found[1]),
                name=str(card.get("Card Series") or card.get("Card series") or ""),
                memory_bytes=int(memory) if memory.isdigit() else 0,
                arch=_arch(str(card.get("GFX Version", ""))),
                uuid=str(card.get("Unique ID", "")),
            )
        )
    system = raw.get("system")
    return sorted(devices, key=lambda each: each.index), str(system.get("Driver version", "")) if isinstance(
        system, dict
    ) else ""


def parse_interconnect(text: str, *, indices: list[int]) -> Interconnect:
    """The slowest link between any two of the devices, from either tool's topology; pcie where it cannot be read."""
    if len(indices) < 2:
        return "none"
    links = parse_links(text)
    return "xgmi" if all(links.get(pair) == "XGMI" for pair in itertools.combinations(sorted(indices), 2)) else "pcie"


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """(a, b) with a < b -> XGMI or PCIE, from either tool's topology; where the two directions differ, the slower one."""
    links: dict[tuple[int, int], str] = {}
    for (a, b), link in (_amd_links(text) or _rocm_links(text)).items():
        pair = (min(a, b), max(a, b))
        if a != b:
            links[pair] = link if links.get(pair, "XGMI") == "XGMI" else links[pair]
    return links


def _amd_links(text: str) -> dict[tuple[int, int], str]:
    links = {}
    for entry in _entries(text):
        for link in entry.get("links") or []:
            if isinstance(link, dict) and isinstance(link.get("gpu"), int) and isinstance(entry.get("gpu"), int):
                links[entry["gpu"], link["gpu"]] = str(link.get("link_type", ""))
    return links


def _rocm_links(text: str) -> dict[tuple[int, int], str]:
    raw = _json(text)
    system = raw.get("system") if isinstance(raw, dict) else None
    links = {}
    for key, value in (system or {}).items():
        found = re.search(r"devices (\d+) and (\d+)", key)
        if found:
            links[int(found[1]), int(found[2])] = str(value)
    return links


def _entries(text: str) -> list[dict[str, Any]]:
    """amd-smi writes a list, newer versions an object around it."""
    raw = _json(text)
    if isinstance(raw, dict):
        raw = raw.get("gpu_data", [])
    return [entry for entry in raw if isinstance(entry, dict)] if isinstance(raw, list) else []


def _json(text: str) -> Any:
    """The JSON in a tool's output, which warnings may precede; None where there is none."""
    starts = [place for place in (text.find("{"), text.find("[")) if place >= 0]
    if not starts:
        return None
    for start in sorted(starts):
        try:
            return json.JSONDecoder().raw_decode(text[start:])[0]
        except json.JSONDecodeError:
            continue
    return None


def _size(size: object) -> int:
    if isinstance(size, dict) and isinstance(size.get("value"), int) and size.get("unit") in _UNITS:
        return size["value"] * _UNITS[size["unit"]]
    return 0


def _arch(text: str) -> str:
    """gfx942:sramecc+:xnack- -> gfx942"""
    found = re.match(r"gfx[0-9a-f]+", text)
    return found[0] if found else ""
