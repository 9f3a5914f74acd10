"""Devices that are there and cannot be used are reported by doctor, and not by the first step of a
run."""

from __future__ import annotations

from pathlib import Path

from milescli.doctor.finding import Status
from milescli.doctor.host import check_visibility
from milescli.platform.probe import find_accelerators
from tests.platform.tools_on_paper import LOST, fail, plant, replay


def test_a_lost_gpu_fails_until_it_is_left_out(tmp_path: Path) -> None:
    accelerators = find_accelerators(replay(LOST), root=tmp_path)
    findings = check_visibility(accelerators, environ={})
    assert [(finding.check, finding.status, finding.what) for finding in findings] == [
        ("visibility", Status.FAIL, "GPU 2 does not respond")
    ]
    assert findings[0].fix[-1].startswith("export CUDA_VISIBLE_DEVICES=0,1,3")
    assert (
        check_visibility(accelerators, environ={"CUDA_VISIBLE_DEVICES": "0,1,3"})[0].status
        is Status.OK
    )


def test_a_driver_that_fails_is_no_machine_without_devices(tmp_path: Path) -> None:
    plant(tmp_path, {"dev/nvidiactl": ""})
    accelerators = find_accelerators(
        fail("nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch"),
        root=tmp_path,
    )
    assert check_visibility(accelerators, environ={})[0].fix[0] == "sudo reboot"
