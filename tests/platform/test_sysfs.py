"""Tests of reading devices from the kernel. The trees are written by hand after the kernel's
formats; none was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.platform.machine import Device
from milescli.platform.probe import find_accelerators
from milescli.platform.sysfs import find_amd, find_nvidia, gfx_name
from tests.platform.tools_on_paper import plant, plant_amd, replay


def test_amd_devices_are_read_from_the_topology_of_kfd(tmp_path: Path) -> None:
    view = find_amd(plant_amd(tmp_path))
    assert view.devices[0] == Device(
        index=0,
        name="AMD Instinct MI300X",
        memory_bytes=206141652992,
        arch="gfx942",
        uuid="GPU-0000000000001001",
    )
    assert (
        [device.index for device in view.devices] == [0, 1]
        and view.links == {(0, 1): "XGMI"}
        and view.num_absent == 0
    )


def test_devices_of_another_container_do_not_count(tmp_path: Path) -> None:
    plant_amd(tmp_path, versions=[90402] * 8)
    for minor in (128, 129, 131, 133, 135):
        (tmp_path / f"dev/dri/renderD{minor}").unlink()
    view = find_amd(tmp_path)
    assert [device.index for device in view.devices] == [0, 1, 2] and view.num_absent == 5
    assert [path.name for path in view.files] == ["renderD130", "renderD132", "renderD134"]


@pytest.mark.parametrize(("link_type", "interconnect"), [(11, "xgmi"), (2, "pcie")])
def test_a_machine_without_the_tools_is_found_and_says_so(
    tmp_path: Path, link_type: int, interconnect: str
) -> None:
    accelerators = find_accelerators(replay({}), root=plant_amd(tmp_path, link_type=link_type))
    assert (accelerators.kind, len(accelerators.devices), accelerators.interconnect) == (
        "rocm",
        2,
        interconnect,
    )
    assert "as the kernel lists" in accelerators.notes[0] and accelerators.faults == []


@pytest.mark.parametrize(
    ("version", "name"),
    [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (110000, "gfx1100")],
)
def test_versions_become_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


def _nvidia(root: Path, *models: str) -> Path:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n"
    plant(root, {"proc/driver/nvidia/version": version})
    for number, model in enumerate(models):
        bus = f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0/information"
        information = (
            f"Model: \t\t {model}\nIRQ:   \t 24\nGPU UUID: \t GPU-{number}c2f\nBus Type: \t "
            f"PCIe\nDevice Minor: \t {number}\n"
        )
        plant(root, {bus: information, f"dev/nvidia{number}": "", "dev/nvidiactl": ""})
    return root


def test_nvidia_devices_are_read_from_proc(tmp_path: Path) -> None:
    devices, gone, driver = find_nvidia(
        _nvidia(tmp_path, "NVIDIA H200", "NVIDIA Some Card", "Unknown")
    )
    assert (devices[0].arch, devices[0].memory_bytes // 2**30, devices[0].uuid) == (
        "sm_90",
        140,
        "GPU-0c2f",
    )
    assert (devices[1].arch, devices[1].memory_bytes) == ("", 0) and driver == "570.124.06"
    assert gone == {2: "Model: Unknown"}


def test_nvidia_devices_without_a_file_do_not_count(tmp_path: Path) -> None:
    root = _nvidia(tmp_path, *["NVIDIA H100 80GB HBM3"] * 4)
    for number in (0, 2):
        (root / f"dev/nvidia{number}").unlink()
    accelerators = find_accelerators(replay({}), root=root)
    assert (accelerators.kind, [device.index for device in accelerators.devices]) == (
        "cuda",
        [0, 1],
    )
    assert [device.uuid for device in accelerators.devices] == ["GPU-1c2f", "GPU-3c2f"]
    for path in (root / "dev").iterdir():
        path.unlink()
    assert find_accelerators(replay({}), root=root).kind == "cpu"
