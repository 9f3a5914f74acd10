"""Tests of reading devices from the kernel. The trees are written by hand after the kernel's formats; none was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.platform.machine import Device
from milescli.platform.probe import find_accelerators
from milescli.platform.sysfs import find_amd, find_nvidia, gfx_name
from tests.platform.tools_on_paper import replay


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _amd(root: Path, *, link_type: int = 11) -> None:
    """A host node and two devices, linked with each other."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    _write(nodes / "0/properties", "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n")
    for number, other in ((1, 2), (2, 1)):
        _write(nodes / f"{number}/properties", f"simd_count 1216\ngfx_target_version 90402\nunique_id {4096 + number}\n")
        _write(nodes / f"{number}/mem_banks/0/properties", "heap_type 1\nsize_in_bytes 206141652992\n")
        _write(nodes / f"{number}/io_links/0/properties", "type 2\nnode_from 1\nnode_to 0\n")
        _write(nodes / f"{number}/io_links/1/properties", f"type {link_type}\nnode_from {number}\nnode_to {other}\n")
    (root / "dev").mkdir()
    (root / "dev/kfd").touch()


def test_amd_devices_are_read_from_the_topology_of_kfd(tmp_path: Path) -> None:
    _amd(tmp_path)
    devices, links = find_amd(tmp_path)
    assert devices[0] == Device(index=0, name="AMD gfx942", memory_bytes=206141652992, arch="gfx942", uuid="0x1001")
    assert [each.index for each in devices] == [0, 1] and links == {(0, 1): "XGMI"}


@pytest.mark.parametrize(("link_type", "interconnect"), [(11, "xgmi"), (2, "pcie")])
def test_a_machine_without_the_tools_is_found_and_says_so(tmp_path: Path, link_type: int, interconnect: str) -> None:
    _amd(tmp_path, link_type=link_type)
    found = find_accelerators(replay({}), root=tmp_path)
    assert (found.kind, len(found.devices), found.interconnect) == ("rocm", 2, interconnect)
    assert "as the kernel tells" in found.notes[0]


def test_devices_that_may_not_be_opened_do_not_count(tmp_path: Path) -> None:
    _amd(tmp_path)
    (tmp_path / "dev/kfd").unlink()
    assert find_accelerators(replay({}), root=tmp_path).kind == "cpu"


def test_a_tool_that_fails_is_believed(tmp_path: Path) -> None:
    _amd(tmp_path)
    found = find_accelerators(replay({}, problem="`amd-smi` ended with 1: driver not initialised"), root=tmp_path)
    assert found.kind == "cpu" and "driver not initialised" in found.notes[0]


@pytest.mark.parametrize(("version", "name"), [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (110000, "gfx1100")])
def test_versions_become_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


def test_nvidia_devices_are_read_from_proc(tmp_path: Path) -> None:
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    for bus, model in (("0000:19:00.0", "NVIDIA H200"), ("0000:3b:00.0", "NVIDIA Some Card")):
        _write(gpus / bus / "information", f"Model: \t\t {model}\nIRQ:   \t 24\nGPU UUID: \t GPU-7c2f\nBus Type: \t PCIe\n")
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n"
    _write(tmp_path / "proc/driver/nvidia/version", version)
    devices, driver = find_nvidia(tmp_path)
    assert (devices[0].arch, devices[0].memory_bytes // 2**30, devices[0].uuid) == ("sm_90", 140, "GPU-7c2f")
    assert (devices[1].arch, devices[1].memory_bytes) == ("", 0) and driver == "570.124.06"
    assert find_accelerators(replay({}), root=tmp_path).kind == "cpu"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert find_accelerators(replay({}), root=tmp_path).kind == "cuda"
