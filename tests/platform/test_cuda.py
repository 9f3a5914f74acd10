"""Tests of reading nvidia-smi."""

from __future__ import annotations

import pytest

from milescli.platform.cuda import parse_cuda_version, parse_devices, parse_interconnect, parse_lost
from milescli.platform.machine import Device
from tests.platform.tools_on_paper import text


def test_devices_and_driver_are_read() -> None:
    devices, driver = parse_devices(text("nvidia_query.txt"))
    assert driver == "570.124.06" and len(devices) == 4
    assert devices[1] == Device(
        index=1,
        name="NVIDIA H200",
        memory_bytes=143_771 * 1024**2,
        arch="sm_90",
        uuid="GPU-7c2f1d5e-0000-1111-2222-000000000001",
    )


@pytest.mark.parametrize(
    "said",
    [
        "",
        "No devices were found",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "a, b, c, d, e, f, g",
        "2, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], 580.126.09, [GPU is lost]",
    ],
)
def test_what_is_no_device_is_none(said: str) -> None:
    assert parse_devices(said) == ([], "")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            "2, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], 580.126.09, [GPU is "
            "lost]",
            "[GPU is lost]",
        ),
        (
            "2, NVIDIA H100 80GB HBM3, GPU-1, [GPU requires reset], 9.0, 580.126.09, Disabled",
            "[GPU requires reset]",
        ),
        (
            "2, NVIDIA H100 80GB HBM3, GPU-1, [Unknown Error], [Unknown Error], 580.126.09, [N/A]",
            "[Unknown Error]",
        ),
        ("2, ERR!, GPU-1, 81559, 9.0, 580.126.09, Disabled", "ERR!"),
        (
            "2, NVIDIA H100 80GB HBM3, GPU-????????-????, 81559, 9.0, 580.126.09, Disabled",
            "GPU-????????-????",
        ),
    ],
)
def test_a_device_that_is_gone_is_left_out_and_named(row: str, said: str) -> None:
    assert parse_devices(row) == ([], "") and parse_lost(row) == {2: said}
    assert (
        parse_lost(text("nvidia_query.txt") + text("gb200_query.txt") + text("mig_query.txt")) == {}
    )


def test_memory_that_is_not_known_is_zero_and_not_a_crash() -> None:
    devices, _ = parse_devices("0, NVIDIA GB10, GPU-1, [N/A], 12.1, 580.95.05, [N/A]")
    assert (devices[0].memory_bytes, devices[0].arch) == (0, "sm_121")


def test_the_cuda_version_is_in_the_header() -> None:
    assert parse_cuda_version(text("nvidia_summary.txt")) == "12.8"
    assert parse_cuda_version("nothing") == ""


def test_the_slowest_link_counts() -> None:
    assert parse_interconnect(text("nvidia_topo.txt"), indices=[0, 1, 2, 3]) == "nvlink"
    assert parse_interconnect(text("nvidia_topo_broken_link.txt"), indices=[0, 1, 2, 3]) == "pcie"
    assert parse_interconnect(text("nvidia_topo_broken_link.txt"), indices=[2, 3]) == "nvlink"
    assert parse_interconnect("", indices=[0, 1]) == "pcie"
    assert parse_interconnect("", indices=[0]) == "none"
