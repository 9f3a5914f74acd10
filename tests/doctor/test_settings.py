"""Tests of variables and of Ray's age."""

from __future__ import annotations

import sys

import pytest

from milescli.doctor.finding import Status
from milescli.doctor.settings import check_ray_version, check_variables
from milescli.doctor.tiny_trainer import tiny_plan


@pytest.mark.parametrize(
    ("version", "status"), [("2.47.1", Status.FAIL), ("2.48.0", Status.OK), ("2.60.0", Status.OK)]
)
def test_an_old_ray_is_a_fail_with_what_it_does_to_amd_devices(
    version: str, status: Status
) -> None:
    finding = check_ray_version(kind="rocm", version_of=lambda _: version)[0]
    assert finding.status is status
    assert status is Status.OK or (
        "HIP_VISIBLE_DEVICES" in finding.why
        and finding.fix == [f"{sys.executable} -m pip install 'ray[default]>=2.48'"]
    )


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", Status.FAIL),
        ("RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES", "1", Status.WARN),
        ("CUDA_LAUNCH_BLOCKING", "1", Status.WARN),
    ],
)
def test_a_variable_that_harms_is_found_and_its_command_mends_it(
    name: str, value: str, status: Status
) -> None:
    finding = check_variables(None, environ={name: value})[0]
    assert finding.status is status and f"{name}={value}" in finding.what
    assert finding.fix[0].startswith(f"unset {name}")
    assert check_variables(None, environ={})[0].status is Status.OK


def test_what_miles_will_replace_is_listed() -> None:
    finding = check_variables(
        tiny_plan("rocm"), environ={"NCCL_MIN_NCHANNELS": "16", "OMP_NUM_THREADS": "99"}
    )[0]
    assert finding.status is Status.WARN and finding.what == "NCCL_MIN_NCHANNELS=16 becomes 112"
    assert finding.fix == ["unset NCCL_MIN_NCHANNELS"]
