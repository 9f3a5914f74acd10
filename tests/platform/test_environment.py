"""Tests of the variables that actors get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from milescli.platform.environment import (
    ROLES,
    engine_environment,
    environment_rows,
    settings,
    trainer_environment,
)
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
def test_every_variable_is_set_once_as_text_and_with_a_reason(
    kind: Kind, role: str, channel: str
) -> None:
    chosen = settings(_Plan(device_kind=kind, channel=channel), role)  # type: ignore[arg-type]
    assert len({setting.name for setting in chosen}) == len(chosen)
    assert all(isinstance(setting.value, str) and setting.reason for setting in chosen)


def test_a_run_on_the_cpu_hides_the_gpus_and_shares_the_cores() -> None:
    environment = trainer_environment(_Plan(cpu_threads=3))
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["HIP_VISIBLE_DEVICES"] == ""


def test_threads_of_a_trainer_on_the_cpu_do_not_wait_awake_for_long() -> None:
    spins = {kind: trainer_environment(_Plan(device_kind=kind)) for kind in ("cpu", "cuda")}
    assert int(spins["cpu"]["GOMP_SPINCOUNT"]) <= 20_000
    assert "GOMP_SPINCOUNT" not in spins["cuda"]


def test_devices_that_the_plan_does_not_name_are_left_to_ray() -> None:
    for kind in ("cuda", "rocm"):
        assert not {
            name
            for name in trainer_environment(_Plan(device_kind=kind))
            if name.endswith("VISIBLE_DEVICES")
        }


@pytest.mark.parametrize(("kind", "variables"), [("cuda", ["CUDA"]), ("rocm", ["HIP", "CUDA"])])
def test_trainer_and_engine_of_a_slot_see_its_device_and_ray_does_not_change_it(
    kind: Kind, variables: list[str]
) -> None:
    plan = _Plan(device_kind=kind)
    for environment in (trainer_environment(plan, ["6"]), engine_environment(plan, ["6"])):
        for name in variables:
            assert environment[f"{name}_VISIBLE_DEVICES"] == "6"
            assert environment[f"RAY_EXPERIMENTAL_NOSET_{name}_VISIBLE_DEVICES"] == "1"
    assert engine_environment(plan, ["4", "6"])[f"{variables[0]}_VISIBLE_DEVICES"] == "4,6"
    assert ("CUDA_DEVICE_ORDER" in trainer_environment(plan, ["6"])) == (kind == "cuda")


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm"])
def test_rows_for_people_hold_every_setting_of_both_roles_once(kind: Kind) -> None:
    plan = _Plan(device_kind=kind)
    rows = environment_rows(plan)
    for role in ROLES:
        shown = {name: value for whom, name, value, _ in rows if whom in ("all", role)}
        wanted = {
            setting.name: setting.value for setting in settings(plan, role, ["(its slot's device)"])
        }
        assert shown == wanted
    assert all(why for *_, why in rows)


@pytest.fixture(autouse=True)
def _no_variables_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cpu", "cuda", "rocm"):
        for role in ROLES:
            for setting in settings(_Plan(device_kind=kind), role):  # type: ignore[arg-type]
                monkeypatch.delenv(setting.name, raising=False)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm"])
def test_the_users_own_value_stands_where_it_is_about_speed_and_nowhere_else(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _Plan(device_kind=kind)
    ours = {role: settings(plan, role, ["0"]) for role in ROLES}
    for setting in (setting for role in ROLES for setting in ours[role]):
        monkeypatch.setenv(setting.name, "theirs")
    for role in ROLES:
        for before, now in zip(ours[role], settings(plan, role, ["0"]), strict=True):
            assert now.value == ("theirs" if before.user_overrides else before.value), now
            assert (
                not before.user_overrides
                or f"yours; miles would set {before.value}: " in now.reason
            )
    yielding = {setting.name for role in ROLES for setting in ours[role] if setting.user_overrides}
    must = {
        name
        for name in yielding
        if "VISIBLE" in name or "ALLOC_CONF" in name or name.startswith(("RAY_", "GLOO_", "OMP_"))
    }
    assert not must and bool(yielding) == (kind != "cpu")


def test_trainers_and_engines_agree_on_how_their_groups_take_memory() -> None:
    for slots, value in (([_Slot(0)], "0"), ([_Slot(0), _Slot(1)], "1")):
        plan = _Plan(device_kind="cuda", slots=slots)
        assert (
            trainer_environment(plan)["NCCL_CUMEM_ENABLE"]
            == engine_environment(plan)["NCCL_CUMEM_ENABLE"]
            == value
        )


def test_loopback_is_pinned_unless_other_nodes_must_reach_the_actor() -> None:
    assert engine_environment(_Plan())["GLOO_SOCKET_IFNAME"] == "lo"
    interfaces = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    environment = engine_environment(_Plan(slots=[_Slot(0), _Slot(1)]), (), interfaces)
    assert {name: environment[name] for name in interfaces} == interfaces


def test_expandable_segments_are_not_used_where_memory_is_shared_by_handle() -> None:
    for kind, name in (("cuda", "PYTORCH_CUDA_ALLOC_CONF"), ("rocm", "PYTORCH_HIP_ALLOC_CONF")):
        assert name not in trainer_environment(_Plan(device_kind=kind, channel="tensor"))
        assert name in trainer_environment(_Plan(device_kind=kind, channel="distributed"))
        assert name not in engine_environment(_Plan(device_kind=kind, channel="distributed"))


def test_what_only_amd_needs_is_set_on_amd_only() -> None:
    assert "HSA_ENABLE_IPC_MODE_LEGACY" in engine_environment(_Plan(device_kind="rocm"))
    assert not {
        name
        for name in engine_environment(_Plan(device_kind="cuda"))
        if name.startswith(("HSA_", "HIP_", "SGLANG_USE_AITER"))
    }
