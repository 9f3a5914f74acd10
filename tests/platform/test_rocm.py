"""Tests of reading amd-smi and rocm-smi."""

from __future__ import annotations

import json

import pytest

from milescli.platform.machine import Device
from milescli.platform.rocm import parse_amd_smi, parse_links, parse_rocm_smi, slowest_link
from tests.platform.tools_on_paper import text


def test_amd_smi_is_read_bare_and_wrapped() -> None:
    bare = text("amd_static.json")
    devices, driver = parse_amd_smi(bare)
    assert driver == "6.12.12" and len(devices) == 2
    assert devices[0] == Device(
        index=0,
        name="AMD Instinct MI300X",
        memory_bytes=196_592 * 1024**2,
        arch="gfx942",
        uuid="GPU-a1b2c3d4e5f60001",
    )
    assert parse_amd_smi(json.dumps({"gpu_data": json.loads(bare)})) == (devices, driver)


def test_rocm_smi_is_read_behind_a_warning() -> None:
    devices, driver = parse_rocm_smi(text("rocm_static.txt"))
    assert driver == "6.14.14"
    assert [(device.index, device.arch, device.memory_bytes) for device in devices] == [
        (0, "gfx950", 309220868096),
        (1, "gfx950", 309220868096),
    ]


@pytest.mark.parametrize(
    "said",
    [
        "",
        "[]",
        "{}",
        "ERROR: no GPUs",
        '{"card0": 3}',
        '[{"gpu": "N/A"}]',
        '[{"gpu": 0, "asic": "N/A"}]',
        "{[",
        "3",
    ],
)
def test_what_is_no_device_is_none(said: str) -> None:
    assert parse_amd_smi(said)[0] == parse_rocm_smi(said)[0] == []


def test_fields_that_are_not_available_are_empty_and_not_a_crash() -> None:
    devices, _ = parse_amd_smi(
        '[{"gpu": 0, "asic": {"market_name": "x"}, "vram": {"size": "N/A"}, "driver": "N/A"}]'
    )
    assert (devices[0].memory_bytes, devices[0].arch) == (0, "")


def test_features_behind_the_arch_are_cut() -> None:
    devices, _ = parse_amd_smi(
        '[{"gpu": 0, "asic": {"target_graphics_version": "gfx90a:sramecc+:xnack-"}}]'
    )
    assert devices[0].arch == "gfx90a"


@pytest.mark.parametrize(
    ("name", "device", "arch", "memory", "driver"),
    [
        ("amd_static_6.0.json", "AMD Instinct MI300X", "gfx942", 196_592 * 1024**2, "6.3.6"),
        ("amd_static_7.2.json", "AMD Instinct MI355X", "gfx950", 294_896 * 1024**2, "6.18.3"),
        (
            "rocm_static_5.2.json",
            "Arcturus GL-XL [AMD Instinct MI100]",
            "",
            34_342_961_152,
            "5.16.9.22.20",
        ),
        ("rocm_static_6.0.json", "AMD Instinct MI250X", "gfx90a", 68_702_699_520, "6.3.6"),
    ],
)
def test_other_releases_write_other_keys(
    name: str, device: str, arch: str, memory: int, driver: str
) -> None:
    parse = parse_amd_smi if name.startswith("amd") else parse_rocm_smi
    devices, version = parse(text(name))
    assert {(device.name, device.arch, device.memory_bytes) for device in devices} == {
        (device, arch, memory)
    }
    assert version == driver and all(
        device.uuid.startswith("GPU-") and len(device.uuid) == 20 for device in devices
    )


@pytest.mark.parametrize(
    "name", ["amd_topology.json", "amd_topology_6.1.json", "rocm_topology.json"]
)
def test_links_of_both_tools_are_read(name: str) -> None:
    assert slowest_link(parse_links(text(name)), indices=[0, 1]) == "xgmi"
    assert slowest_link(parse_links(text(name).replace("XGMI", "PCIE")), indices=[0, 1]) == "pcie"
    assert slowest_link(parse_links(text(name)), indices=[0, 1, 2]) == "pcie"
