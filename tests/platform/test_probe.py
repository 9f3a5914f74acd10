"""Tests of the probe on paper machines, healthy and with faults planted, and once on this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from milescli.core.errors import MachineError
from milescli.platform import cuda, rocm
from milescli.platform import probe as module
from milescli.platform.cpu import HostFacts
from milescli.platform.machine import Machine
from milescli.platform.probe import RunTool, fault_errors, find_accelerators, probe, run_tool
from tests.platform.tools_on_paper import (
    AMD,
    GB200,
    LOST,
    MIG,
    NVIDIA,
    ROCM,
    fail,
    plant,
    plant_amd,
    replay,
    text,
)

HOST = HostFacts(
    cpu_cores=96, memory_bytes=2**41, available_bytes=2**40, shm_bytes=2**37, num_numa_nodes=2
)
LOADED = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06\n",
    "dev/nvidiactl": "",
}


def _probe(
    run: RunTool, root: Path, may_open: Callable[[Path], bool] = Path.exists, **environ: str
) -> Machine:
    return probe(run=run, root=root, environ=environ, host=HOST, may_open=may_open)


def _refused(
    run: RunTool, root: Path, may_open: Callable[[Path], bool] = Path.exists, **environ: str
) -> MachineError:
    with pytest.raises(MachineError) as error:
        _probe(run, root, may_open, **environ)
    assert error.value.why and error.value.fixes
    return error.value


def _obey(fix: str) -> dict[str, str]:
    """What the shell's environment gains by pasting `export NAME=value   # why`."""
    name, _, value = fix.partition("#")[0].strip().removeprefix("export ").partition("=")
    return {name: value}


def test_an_nvidia_machine_is_found(tmp_path: Path) -> None:
    machine = _probe(replay(NVIDIA), tmp_path)
    assert (machine.kind, machine.driver_version, machine.runtime_version) == (
        "cuda",
        "570.124.06",
        "12.8",
    )
    assert len(machine.nodes[0].devices) == 4 and machine.nodes[0].interconnect == "nvlink"
    assert machine.nodes[0].cpu_cores == 96 and machine.notes == []


def test_a_tray_of_gb200_is_found(tmp_path: Path) -> None:
    machine = _probe(replay(GB200), tmp_path)
    assert {
        (device.name, device.arch, device.memory_bytes // 2**20)
        for device in machine.nodes[0].devices
    } == {("NVIDIA GB200", "sm_100", 189_471)}
    assert len(machine.nodes[0].devices) == 4 and machine.nodes[0].interconnect == "nvlink"


@pytest.mark.parametrize(("texts", "arch"), [(AMD, "gfx942"), (ROCM, "gfx950")])
def test_an_amd_machine_is_found_by_either_tool(
    tmp_path: Path, texts: dict[tuple[str, ...], str], arch: str
) -> None:
    plant_amd(plant(tmp_path, {"opt/rocm/.info/version": "7.2.0-43\n"}))
    machine = _probe(replay(texts), tmp_path)
    assert (machine.kind, machine.runtime_version, machine.nodes[0].interconnect) == (
        "rocm",
        "7.2.0-43",
        "xgmi",
    )
    assert {device.arch for device in machine.nodes[0].devices} == {arch} and machine.notes == []


def test_only_visible_devices_are_given(tmp_path: Path) -> None:
    machine = _probe(replay(NVIDIA), tmp_path, CUDA_VISIBLE_DEVICES="2")
    assert [device.index for device in machine.nodes[0].devices] == [2]
    assert machine.nodes[0].interconnect == "none" and machine.visibility == {
        "CUDA_VISIBLE_DEVICES": "2"
    }


def test_hidden_devices_leave_a_cpu_and_a_note(tmp_path: Path) -> None:
    machine = _probe(replay(NVIDIA), tmp_path, CUDA_VISIBLE_DEVICES="")
    assert machine.kind == "cpu" and machine.notes == [
        "4 cuda devices are there, and none is visible"
    ]
    machine.check("test")


def test_contradicting_variables_are_refused(tmp_path: Path) -> None:
    assert (
        "contradict"
        in _refused(
            replay(AMD), plant_amd(tmp_path), HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1"
        ).what
    )


def test_devices_without_a_topology_are_taken_to_be_on_pcie(tmp_path: Path) -> None:
    machine = _probe(replay({cuda.QUERY: NVIDIA[cuda.QUERY]}), tmp_path)
    assert machine.nodes[0].interconnect == "pcie" and machine.runtime_version == ""


NVIDIA_FAILS = {
    "Failed to initialize NVML: Driver/library version mismatch": (
        "of two versions",
        "sudo reboot",
    ),
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.": (
        "not loaded",
        "sudo modprobe nvidia",
    ),
    "Unable to determine the device handle for GPU0000:65:00.0: Unknown Error": (
        "fallen off the bus",
        "sudo dmesg",
    ),
    "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost. Reboot the system": (
        "fallen off",
        "sudo dmesg",
    ),
    "Failed to initialize NVML: Insufficient Permissions": (
        "may not be opened",
        "ls -l /dev/nvidia*",
    ),
    "Failed to initialize NVML: Unknown Error": ("container has lost", "docker restart"),
    "Failed to initialize NVML: GPU access blocked by the operating system": (
        "WSL",
        "wsl.exe --update",
    ),
    "`nvidia-smi` did not answer within 20 s": ("hangs", "sudo dmesg"),
    "No devices were found": ("has no GPU", "sudo dmesg"),
    "something new": ("its tool fails", "nvidia-smi"),
}


@pytest.mark.parametrize("said", NVIDIA_FAILS)
def test_a_driver_of_nvidia_that_fails_is_no_reason_to_run_on_the_cpu_unasked(
    tmp_path: Path, said: str
) -> None:
    what, fix = NVIDIA_FAILS[said]
    error = _refused(fail("nvidia-smi", said), plant(tmp_path, LOADED))
    assert what in error.what and said in error.why and error.fixes[0].startswith(fix)
    hidden = _obey(error.fixes[-1])
    assert hidden == {"CUDA_VISIBLE_DEVICES": ""}
    assert _probe(fail("nvidia-smi", said), tmp_path, **hidden).kind == "cpu"


@pytest.mark.parametrize("said", NVIDIA_FAILS)
def test_a_tool_without_a_driver_and_a_gpu_is_only_noted(tmp_path: Path, said: str) -> None:
    machine = _probe(fail("nvidia-smi", said), tmp_path)
    assert machine.kind == "cpu" and said in machine.notes[0]


def test_a_gpu_on_the_bus_without_its_driver_is_reported(tmp_path: Path) -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    bus = "sys/bus/pci/devices/0000:65:00.0"
    plant(tmp_path, {f"{bus}/vendor": "0x10de\n", f"{bus}/class": "0x030200\n"})
    assert "not loaded" in _refused(fail("nvidia-smi", said), tmp_path).what
    plant(tmp_path, {f"{bus}/class": "0x040300\n"})
    assert _probe(fail("nvidia-smi", said), tmp_path).kind == "cpu"


def test_an_answer_without_a_device_counts_as_a_failure(tmp_path: Path) -> None:
    run = replay({cuda.QUERY: "No devices were found\n"})
    assert "has no GPU" in _refused(run, plant(tmp_path, LOADED)).what


def test_a_gpu_that_does_not_answer_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    error = _refused(replay(LOST), tmp_path)
    assert error.what == "GPU 2 does not respond" and "GPU is lost" in error.why
    rest = _probe(replay(LOST), tmp_path, **_obey(error.fixes[-1]))
    assert [device.index for device in rest.nodes[0].devices] == [0, 1, 3]
    assert "GPU 2" in _refused(replay(LOST), tmp_path, CUDA_VISIBLE_DEVICES="1,2").what


def test_a_list_that_breaks_off_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    rows = "".join(text("nvidia_query.txt").splitlines(keepends=True)[:3])
    run = fail(
        "nvidia-smi",
        "Unable to determine the device handle for GPU0000:9B:00.0: Unknown Error",
        text=rows,
    )
    assert "fallen off the bus" in _refused(run, tmp_path).what
    assert len(_probe(run, tmp_path, CUDA_VISIBLE_DEVICES="0,1").nodes[0].devices) == 2


def test_a_gpu_in_instances_is_refused_until_one_is_chosen(tmp_path: Path) -> None:
    error = _refused(replay(MIG), tmp_path)
    assert "GPU 0 is cut into instances" in error.what
    whole, instance = (
        _probe(replay(MIG), tmp_path, **_obey(fix)).nodes[0].devices for fix in error.fixes[:2]
    )
    assert [(device.index, device.memory_bytes // 2**20) for device in whole] == [(1, 81_920)]
    assert [(device.name, device.memory_bytes // 2**20, device.arch) for device in instance] == [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40_192, "sm_80")
    ]
    two = "MIG-b3061c09-2a4c-5026-a575-79f86a5bb12c,MIG-53864714-0a66-5df2-9007-9268e30d9a72"
    for value in ("0", "0,1", two):
        assert (
            "cut into instances" in _refused(replay(MIG), tmp_path, CUDA_VISIBLE_DEVICES=value).what
        )


def test_a_container_with_one_instance_has_one_device(tmp_path: Path) -> None:
    query = "0, NVIDIA H200, GPU-9c73, [Insufficient Permissions], 9.0, 580.95.05, Enabled\n"
    listing = (
        "GPU 0: NVIDIA H200 (UUID: GPU-9c73)\n  MIG 2g.35gb     Device  0: (UUID: MIG-51fa7c7a)\n"
    )
    devices = (
        _probe(replay({cuda.QUERY: query, cuda.INSTANCES: listing}), tmp_path).nodes[0].devices
    )
    assert [(device.name, device.memory_bytes) for device in devices] == [
        ("NVIDIA H200 MIG 2g.35gb", 35 * 10**9)
    ]


def test_memory_that_is_not_known_is_that_of_the_model_or_of_the_host(tmp_path: Path) -> None:
    row = "0, {name}, GPU-1, [N/A], {arch}, 580.95.05, [N/A]\n"
    for name, arch, memory in (("NVIDIA GB10", "12.1", 2**41), ("NVIDIA H200", "9.0", 140 * 2**30)):
        run = replay({cuda.QUERY: row.format(name=name, arch=arch)})
        assert _probe(run, tmp_path).nodes[0].devices[0].memory_bytes == memory


MIXED = """0, NVIDIA A100-SXM4-80GB, GPU-a, 81920, 8.0, 580.95.05, Disabled
1, NVIDIA H100 80GB HBM3, GPU-b, 81559, 9.0, 580.95.05, Disabled
2, NVIDIA H100 80GB HBM3, GPU-c, 81559, 9.0, 580.95.05, Disabled
"""


def test_gpus_of_several_models_are_refused_with_each_group_to_choose(tmp_path: Path) -> None:
    run = replay({cuda.QUERY: MIXED})
    error = _refused(run, tmp_path)
    assert "1 x NVIDIA A100-SXM4-80GB and 2 x NVIDIA H100 80GB HBM3" in error.what
    chosen = [_probe(run, tmp_path, **_obey(fix)).nodes[0].devices for fix in error.fixes]
    assert [[device.index for device in devices] for devices in chosen] == [[1, 2], [0]]


def test_an_old_gpu_is_not_trained_on(tmp_path: Path) -> None:
    old = "0, NVIDIA GeForce GT 710, GPU-a, 2048, 3.5, 470.256.02, [N/A]\n"
    beside = old + "1, NVIDIA H100 80GB HBM3, GPU-b, 81559, 9.0, 580.95.05, Disabled\n"
    error = _refused(replay({cuda.QUERY: beside}), tmp_path)
    assert "GT 710" in error.what and error.fixes == ["export CUDA_VISIBLE_DEVICES=1"]
    machine = _probe(replay({cuda.QUERY: old}), tmp_path)
    assert machine.kind == "cpu" and "GT 710" in machine.notes[0]
    machine.check("test")


AMD_FAILS = {
    "`amd-smi` did not answer within 20 s": ("hangs", "sudo dmesg"),
    "AMDSMI_STATUS_NOT_INIT - Device not initialized": ("not ready", "sudo modprobe amdgpu"),
    "something new": ("its tool fails", "amd-smi"),
}


@pytest.mark.parametrize("said", AMD_FAILS)
def test_a_driver_of_amd_that_fails_is_believed(tmp_path: Path, said: str) -> None:
    what, fix = AMD_FAILS[said]
    error = _refused(fail("amd-smi", said), plant_amd(tmp_path))
    assert what in error.what and said in error.why and error.fixes[0].startswith(fix)
    assert _probe(fail("amd-smi", said), tmp_path, **_obey(error.fixes[-1])).kind == "cpu"


def test_the_tool_of_an_image_without_a_device_is_only_noted(tmp_path: Path) -> None:
    machine = _probe(fail("amd-smi", "AMDSMI_STATUS_NOT_INIT - Device not initialized"), tmp_path)
    assert machine.kind == "cpu" and "NOT_INIT" in machine.notes[0]


def test_a_tool_that_misses_groups_is_overruled_by_the_kernel(tmp_path: Path) -> None:
    said = "RuntimeError: WARNING: User is missing the following required groups: render, video."
    machine = _probe(fail("amd-smi", said), plant_amd(tmp_path))
    assert (machine.kind, len(machine.nodes[0].devices), machine.nodes[0].interconnect) == (
        "rocm",
        2,
        "xgmi",
    )
    assert said in machine.notes[0] and "as the kernel lists" in machine.notes[1]


@pytest.mark.parametrize("closed", ["kfd", "renderD129"])
def test_device_files_that_may_not_be_opened_are_reported(tmp_path: Path, closed: str) -> None:
    error = _refused(replay(AMD), plant_amd(tmp_path), lambda path: path.name != closed)
    assert error.what.startswith("there is no permission") and closed in error.what
    assert error.fixes[0].startswith("sudo usermod -aG render,video")
    assert (
        _probe(replay(AMD), tmp_path, lambda path: path.name != closed, HIP_VISIBLE_DEVICES="").kind
        == "cpu"
    )


def test_a_device_that_may_not_be_opened_can_be_left_out(tmp_path: Path) -> None:
    machine = _probe(
        replay(AMD),
        plant_amd(tmp_path),
        lambda path: path.name != "renderD129",
        HIP_VISIBLE_DEVICES="0",
    )
    assert [device.index for device in machine.nodes[0].devices] == [0]


def test_a_container_without_the_files_is_reported(tmp_path: Path) -> None:
    assert "/dev/kfd does not exist" in _refused(replay(AMD), tmp_path).what
    plant_amd(tmp_path, files=False)
    assert "/dev/dri/renderD* does not exist" in _refused(replay(AMD), tmp_path).what


def test_a_container_with_some_of_the_devices_has_those(tmp_path: Path) -> None:
    plant_amd(tmp_path, versions=[90402] * 3)
    (tmp_path / "dev/dri/renderD129").unlink()
    several = (
        text("amd_static.json").strip()[:-1]
        + ', {"gpu": 2, "asic": {"market_name": "AMD Instinct MI300X"}}]'
    )
    machine = _probe(replay({rocm.AMD_STATIC: several}), tmp_path)
    assert (
        len(machine.nodes[0].devices) == 2
        and "1 more are not in this container" in machine.notes[0]
    )


def test_integrated_graphics_are_not_trained_on(tmp_path: Path) -> None:
    plant_amd(tmp_path, versions=[100306, 90010])
    run = replay({rocm.AMD_STATIC: text("amd_static_igpu.json")})
    error = _refused(run, tmp_path)
    assert "gfx1036" in error.what and error.fixes == ["export HIP_VISIBLE_DEVICES=1"]
    assert [
        device.name for device in _probe(run, tmp_path, **_obey(error.fixes[0])).nodes[0].devices
    ] == ["AMD Instinct MI210"]


def test_a_laptop_with_amds_graphics_is_a_cpu_whoever_may_open_them(tmp_path: Path) -> None:
    plant_amd(tmp_path, versions=[110003])
    for may_open in (Path.exists, lambda path: False):
        machine = _probe(replay({}), tmp_path, may_open)
        assert machine.kind == "cpu" and "gfx1103" in machine.notes[-1]
    assert _probe(fail("amd-smi", "something new"), tmp_path).kind == "cpu"


def test_faults_are_listed_without_being_raised(tmp_path: Path) -> None:
    accelerators = find_accelerators(replay(LOST), root=tmp_path)
    assert [error.what for error in fault_errors(accelerators, {})] == ["GPU 2 does not respond"]
    assert fault_errors(accelerators, {"CUDA_VISIBLE_DEVICES": "0"}) == []


def test_tools_that_hang_fail_or_are_absent_are_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOOL_TIMEOUT_S", 0.2)
    assert run_tool(["miles-no-such-tool"]) == module.ToolReply(text="")
    assert "did not answer" in run_tool(["sleep", "5"]).problem
    failed = run_tool(["sh", "-c", "echo half; echo bad >&2; echo more >&2; exit 3"])
    assert "ended with 3: bad" in failed.problem and failed.text == "half\n"
    python = run_tool(
        ["sh", "-c", "printf 'Traceback:\\n  line\\nRuntimeError: why\\n' >&2; exit 1"]
    )
    assert python.problem.endswith("RuntimeError: why")
    assert run_tool(["echo", "yes"]).text == "yes\n"


def test_tools_are_found_where_vendors_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho from wsl\n")
    tool.chmod(0o755)
    monkeypatch.setattr(module, "TOOL_FOLDERS", (str(tmp_path),))
    assert run_tool(["nvidia-smi"]).text == "from wsl\n"


def test_the_probe_of_this_machine_loads_no_torch() -> None:
    code = (
        "import sys; from milescli.platform.probe import probe; m = probe(); m.check('here'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=400, check=False).returncode == 0
