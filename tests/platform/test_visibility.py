"""Tests of the three visibility variables: what they leave, and each contradiction with the command
that mends it."""

from __future__ import annotations

import pytest

from milescli.core.errors import MachineError
from milescli.platform.machine import Device, Kind
from milescli.platform.visibility import device_names, find_conflicts, visible_devices

DEVICES = [
    Device(index=index, name="x", memory_bytes=1, arch="y", uuid=f"GPU-{index}abc")
    for index in range(4)
]


def _visible(kind: Kind, **environ: str) -> list[int]:
    return [device.index for device in visible_devices(kind, DEVICES, environ)]


@pytest.mark.parametrize(
    ("environ", "indices"),
    [
        ({}, [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": " 1 , 3 "}, [1, 3]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-3a,GPU-0abc"}, [3, 0]),
        ({"HIP_VISIBLE_DEVICES": "1"}, [0, 1, 2, 3]),
    ],
)
def test_cuda_obeys_its_own_variable(environ: dict[str, str], indices: list[int]) -> None:
    assert _visible("cuda", **environ) == indices


@pytest.mark.parametrize(
    ("environ", "indices"),
    [
        ({"HIP_VISIBLE_DEVICES": "3,1"}, [3, 1]),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, [3, 1]),
        ({"HIP_VISIBLE_DEVICES": "1,2", "CUDA_VISIBLE_DEVICES": "1, 2"}, [1, 2]),
    ],
)
def test_rocm_obeys_hip_and_then_cuda(environ: dict[str, str], indices: list[int]) -> None:
    assert _visible("rocm", **environ) == indices


@pytest.mark.parametrize(
    ("kind", "environ", "fix"),
    [
        ("cuda", {"CUDA_VISIBLE_DEVICES": "0,4"}, "export CUDA_VISIBLE_DEVICES=0,1,2,3"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "0,,1"}, "export CUDA_VISIBLE_DEVICES=0,1,2,3"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "all"}, "export CUDA_VISIBLE_DEVICES=0,1,2,3"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-"}, "export CUDA_VISIBLE_DEVICES=0,1,2,3"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "1,1"}, "export CUDA_VISIBLE_DEVICES=0,1,2,3"),
        (
            "rocm",
            {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"},
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            "rocm",
            {"ROCR_VISIBLE_DEVICES": "2"},
            "unset ROCR_VISIBLE_DEVICES && export HIP_VISIBLE_DEVICES=2",
        ),
        (
            "rocm",
            {"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0"},
            "unset ROCR_VISIBLE_DEVICES",
        ),
    ],
)
def test_a_contradiction_is_refused_with_the_command_that_mends_it(
    kind: Kind, environ: dict[str, str], fix: str
) -> None:
    with pytest.raises(MachineError) as error:
        visible_devices(kind, DEVICES, environ)
    assert error.value.fixes == [fix]


def test_a_cpu_has_nothing_to_contradict() -> None:
    assert (
        find_conflicts("cpu", [], {"CUDA_VISIBLE_DEVICES": "7", "ROCR_VISIBLE_DEVICES": "1"}) == []
    )


@pytest.mark.parametrize(
    ("kind", "environ", "names"),
    [
        ("cuda", {}, ["1", "0"]),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "4, 6"}, ["6", "4"]),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-3a,GPU-0abc"}, ["GPU-0abc", "GPU-3a"]),
        ("rocm", {"HIP_VISIBLE_DEVICES": "3,1"}, ["1", "3"]),
        ("rocm", {"CUDA_VISIBLE_DEVICES": "3,1"}, ["1", "3"]),
    ],
)
def test_a_place_in_the_plan_is_named_as_the_own_variable_names_it(
    kind: Kind, environ: dict[str, str], names: list[str]
) -> None:
    assert device_names(kind, [1, 0], environ) == names
