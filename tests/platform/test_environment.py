"""Tests of the variables that actors get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from milescli.platform.environment import engine_environment, settings, trainer_environment
from milescli.platform.machine import Kind


@dataclass
class _Slot:
    node: int = 0


@dataclass
class _Plan:
    device_kind: Kind = "cpu"
    cpu_threads: int = 2
    channel: Literal["tensor", "distributed"] = "tensor"
    slots: list[_Slot] = field(default_factory=lambda: [_Slot()])


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm"])
@pytest.mark.parametrize("role", ["trainer", "engine"])
@pytest.mark.parametrize("channel", ["tensor", "distributed"])
def test_every_variable_is_set_once_as_text_and_with_a_reason(kind: Kind, role: str, channel: str) -> None:
    chosen = settings(_Plan(device_kind=kind, channel=channel), role)  # type: ignore[arg-type]
    assert len({each.name for each in chosen}) == len(chosen)
    assert all(isinstance(each.value, str) and each.reason for each in chosen)


def test_a_run_on_the_cpu_hides_the_gpus_and_shares_the_cores() -> None:
    environment = trainer_environment(_Plan(cpu_threads=3))
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["HIP_VISIBLE_DEVICES"] == ""


def test_devices_of_an_accelerator_are_left_to_ray() -> None:
    for kind in ("cuda", "rocm"):
        assert not {name for name in trainer_environment(_Plan(device_kind=kind)) if name.endswith("VISIBLE_DEVICES")}


def test_loopback_is_pinned_on_one_node_only() -> None:
    assert engine_environment(_Plan())["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in engine_environment(_Plan(slots=[_Slot(0), _Slot(1)]))


def test_expandable_segments_are_not_used_where_memory_is_shared_by_handle() -> None:
    for kind, name in (("cuda", "PYTORCH_CUDA_ALLOC_CONF"), ("rocm", "PYTORCH_HIP_ALLOC_CONF")):
        assert name not in trainer_environment(_Plan(device_kind=kind, channel="tensor"))
        assert name in trainer_environment(_Plan(device_kind=kind, channel="distributed"))
        assert name not in engine_environment(_Plan(device_kind=kind, channel="distributed"))


def test_what_only_amd_needs_is_set_on_amd_only() -> None:
    assert "HSA_ENABLE_IPC_MODE_LEGACY" in engine_environment(_Plan(device_kind="rocm"))
    assert not {
        name for name in engine_environment(_Plan(device_kind="cuda")) if name.startswith(("HSA_", "HIP_", "SGLANG_USE_AITER"))
    }
