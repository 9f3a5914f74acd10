"""Tests of the probe on paper machines, and once on this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from milescli.core.errors import MachineError
from milescli.platform import cuda
from milescli.platform import probe as module
from milescli.platform.cpu import HostFacts
from milescli.platform.machine import Machine
from milescli.platform.probe import RunTool, probe, run_tool
from tests.platform.tools_on_paper import AMD, NVIDIA, ROCM, replay

HOST = HostFacts(cpu_cores=96, memory_bytes=2**41, shm_bytes=2**37, num_numa_nodes=2)


def _probe(run: RunTool, root: Path, **environ: str) -> Machine:
    return probe(run=run, root=root, environ=environ, host=HOST)


def test_an_nvidia_machine_is_found(tmp_path: Path) -> None:
    machine = _probe(replay(NVIDIA), tmp_path)
    assert (machine.kind, machine.driver_version, machine.runtime_version) == ("cuda", "570.124.06", "12.8")
    assert len(machine.nodes[0].devices) == 4 and machine.nodes[0].interconnect == "nvlink"
    assert machine.nodes[0].cpu_cores == 96 and machine.notes == []


@pytest.mark.parametrize(("texts", "arch"), [(AMD, "gfx942"), (ROCM, "gfx950")])
def test_an_amd_machine_is_found_by_either_tool(tmp_path: Path, texts: dict[tuple[str, ...], str], arch: str) -> None:
    (tmp_path / "opt/rocm/.info").mkdir(parents=True)
    (tmp_path / "opt/rocm/.info/version").write_text("7.2.0-43\n")
    machine = _probe(replay(texts), tmp_path)
    assert (machine.kind, machine.runtime_version, machine.nodes[0].interconnect) == ("rocm", "7.2.0-43", "xgmi")
    assert {device.arch for device in machine.nodes[0].devices} == {arch}


def test_only_visible_devices_are_given(tmp_path: Path) -> None:
    machine = _probe(replay(NVIDIA), tmp_path, CUDA_VISIBLE_DEVICES="2")
    assert [device.index for device in machine.nodes[0].devices] == [2]
    assert machine.nodes[0].interconnect == "none" and machine.visibility == {"CUDA_VISIBLE_DEVICES": "2"}


def test_hidden_devices_leave_a_cpu_and_a_note(tmp_path: Path) -> None:
    machine = _probe(replay(NVIDIA), tmp_path, CUDA_VISIBLE_DEVICES="")
    assert machine.kind == "cpu" and machine.notes == ["4 cuda devices are there, and none is visible"]
    machine.check("test")


def test_contradicting_variables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="contradict"):
        _probe(replay(AMD), tmp_path, HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1")


def test_a_tool_that_fails_leaves_a_note(tmp_path: Path) -> None:
    machine = _probe(replay({}, problem="nvidia-smi ended with 9"), tmp_path)
    assert machine.kind == "cpu" and "nvidia-smi ended with 9" in machine.notes


def test_a_driver_without_its_tool_leaves_a_note(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert "lists no device" in _probe(replay({}), tmp_path).notes[0]


def test_devices_without_a_topology_are_taken_to_be_on_pcie(tmp_path: Path) -> None:
    machine = _probe(replay({cuda.QUERY: NVIDIA[cuda.QUERY]}), tmp_path)
    assert machine.nodes[0].interconnect == "pcie" and machine.runtime_version == ""


def test_tools_that_hang_fail_or_are_absent_are_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOOL_TIMEOUT_S", 0.2)
    assert run_tool(["miles-no-such-tool"]) == module.ToolReply(text="")
    assert "did not answer" in run_tool(["sleep", "5"]).problem
    assert "ended with 3: bad" in run_tool(["sh", "-c", "echo bad >&2; exit 3"]).problem
    assert run_tool(["echo", "yes"]).text == "yes\n"


def test_the_probe_of_this_machine_loads_no_torch() -> None:
    code = (
        "import sys; from milescli.platform.probe import probe; m = probe(); m.check('here'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
