"""Composes the environment variables that trainer ranks and engines need, per vendor, each with its
reason. No other module does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from milescli.platform.machine import Kind

Role = Literal["trainer", "engine"]
ROLES: tuple[Role, ...] = ("trainer", "engine")
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface for Gloo and NCCL (RCCL too)."""
SPIN_COUNT = "10000"
"""Value of GOMP_SPINCOUNT on a CPU: threads wait awake for a fraction of a millisecond, which
bridges the gap to the next operation; the default of some milliseconds keeps the core from others
that need it."""

KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Variables of torch's and oneDNN's own caches of kernels, which hold 1,024 each."""
NUM_KERNELS = "128"
"""Size of each cache for a trainer rank on a CPU, and for an engine that sees images: more than the
kinds of products in a model, forward and backward. Rows of other lengths need other kernels: with
1,024 a rank of the quickstart grew by 1.3 GiB in its 400 warm-up steps."""


class SlotView(Protocol):
    """Declares what this module needs of a plan's slot."""

    @property
    def node(self) -> int: ...


class PlanView(Protocol):
    """Declares what this module needs of a plan."""

    @property
    def device_kind(self) -> Kind: ...
    @property
    def cpu_threads(self) -> int: ...
    @property
    def channel(self) -> str: ...
    @property
    def slots(self) -> Sequence[SlotView]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Holds one variable and its reason."""

    name: str
    value: str
    reason: str
    user_overrides: bool = False
    """True if the user's own value is kept: the variable affects only speed, or works around faults
    of releases that the user may not have. The plan depends on all others."""


def trainer_environment(
    plan: PlanView, devices: Sequence[str] = (), interfaces: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of one trainer rank; `devices` and `interfaces` as in `settings`."""
    return {
        setting.name: setting.value for setting in settings(plan, "trainer", devices, interfaces)
    }


def engine_environment(
    plan: PlanView, devices: Sequence[str] = (), interfaces: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of one engine; `devices` and `interfaces` as in `settings`."""
    return {
        setting.name: setting.value for setting in settings(plan, "engine", devices, interfaces)
    }


def settings(
    plan: PlanView,
    role: Role,
    devices: Sequence[str] = (),
    interfaces: Mapping[str, str] | None = None,
) -> list[Setting]:
    """Return all variables of one role in a fixed order, without duplicates.

    `devices` are those that the actor may see, from `visibility.device_names`; without any, Ray
    decides (it gives an actor the devices of its bundle, in its own order). `interfaces` maps
    variables to the network interface of the actor's node if other nodes must reach it.
    """
    of_vendor = {"cpu": _cpu, "cuda": _cuda, "rocm": _rocm}[plan.device_kind](plan, role)
    chosen = [*_network(interfaces), *of_vendor, *_visibility(plan.device_kind, devices)]
    assert len({setting.name for setting in chosen}) == len(chosen), chosen
    return [_user_value(setting, os.environ) for setting in chosen]


def _user_value(setting: Setting, environ: Mapping[str, str]) -> Setting:
    theirs = environ.get(setting.name)
    if not setting.user_overrides or theirs is None or theirs == setting.value:
        return setting
    return replace(
        setting, value=theirs, reason=f"yours; miles would set {setting.value}: {setting.reason}"
    )


def environment_rows(plan: PlanView) -> list[tuple[str, str, str, str]]:
    """Return (role, variable, value, reason) for people: first what trainer and engine share, then
    the differences."""
    own = ["(its slot's device)"] if plan.device_kind != "cpu" else []
    several = len({slot.node for slot in plan.slots}) > 1
    interfaces = (
        dict.fromkeys(INTERFACE_VARIABLES, "(that of its node's address)") if several else None
    )
    per_role = {role: settings(plan, role, own, interfaces) for role in ROLES}
    shared = [setting for setting in per_role["trainer"] if setting in per_role["engine"]]
    rows = [("all", setting) for setting in shared]
    rows += [
        (role, setting) for role in ROLES for setting in per_role[role] if setting not in shared
    ]
    return [(whom, setting.name, setting.value, setting.reason) for whom, setting in rows]


def _visibility(kind: Kind, devices: Sequence[str]) -> list[Setting]:
    """Give the process the slot's own devices, and keep Ray from choosing others: trainer rank and
    engine of a slot must be on the same device."""
    if not devices or kind == "cpu":
        return []
    value = ",".join(devices)
    own = "the devices of its slot: trainer rank and engine of one slot share memory there"
    keep = "else Ray overwrites what the plan says with devices in an order of its own"
    if kind == "cuda":
        order = "numbers mean what nvidia-smi means; CUDA alone would count the fastest first"
        return [
            Setting(name="CUDA_VISIBLE_DEVICES", value=value, reason=own),
            Setting(name="CUDA_DEVICE_ORDER", value="PCI_BUS_ID", reason=order),
            Setting(name="RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", value="1", reason=keep),
        ]
    same = "equal to HIP_VISIBLE_DEVICES: HIP obeys that one, some libraries read this one"
    return [
        Setting(name="HIP_VISIBLE_DEVICES", value=value, reason=own),
        Setting(name="CUDA_VISIBLE_DEVICES", value=value, reason=same),
        *(
            Setting(name=f"RAY_EXPERIMENTAL_NOSET_{vendor}_VISIBLE_DEVICES", value="1", reason=keep)
            for vendor in ("HIP", "ROCR", "CUDA")
        ),
    ]


def _network(interfaces: Mapping[str, str] | None) -> list[Setting]:
    if interfaces:
        reason = (
            "the interface by whose address other nodes reach this one, or the one that you "
            "set: a guess may take another"
        )
        return [
            Setting(name=name, value=value, reason=reason)
            for name, value in sorted(interfaces.items())
        ]
    return [
        Setting(
            name="GLOO_SOCKET_IFNAME",
            value="lo",
            reason="one node: loopback, also where the host name does not resolve",
        )
    ]


def _threads(count: int, reason: str) -> list[Setting]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return [Setting(name=name, value=str(count), reason=reason) for name in names]


def _cpu(plan: PlanView, role: Role) -> list[Setting]:
    hidden = "a run on the CPU must not touch a GPU that happens to be there"
    chosen = [
        *_threads(plan.cpu_threads, "the plan's share of the cores"),
        Setting(name="CUDA_VISIBLE_DEVICES", value="", reason=hidden),
        Setting(name="HIP_VISIBLE_DEVICES", value="", reason=hidden),
    ]
    if role == "trainer":
        reason = "threads wait awake for the next operation, but let others have the core soon"
        chosen.append(Setting(name="GOMP_SPINCOUNT", value=SPIN_COUNT, reason=reason))
        reason = "oneDNN's kernels are made for one length of a row, and few lengths come twice"
        chosen += [Setting(name=name, value=NUM_KERNELS, reason=reason) for name in KERNEL_CACHES]
    return chosen


def _accelerator(plan: PlanView, role: Role, *, allocator: str) -> list[Setting]:
    chosen = [
        *_threads(max(1, min(8, plan.cpu_threads)), "the host side of a device needs few threads"),
        Setting(
            name="TORCH_NCCL_ASYNC_ERROR_HANDLING",
            value="1",
            reason="a collective whose peer died ends with an error",
        ),
    ]
    if role == "trainer":
        chosen.append(
            Setting(
                name="CUDA_DEVICE_MAX_CONNECTIONS",
                value="1",
                reason="Megatron-Core orders communication before computation by it",
            )
        )
        if plan.channel == "distributed":
            reason = (
                "less fragmentation; not with the tensor channel, whose memory handles cannot be "
                "shared from such segments"
            )
            chosen.append(Setting(name=allocator, value="expandable_segments:True", reason=reason))
    return chosen


def _cuda(plan: PlanView, role: Role) -> list[Setting]:
    spans_nodes = len({slot.node for slot in plan.slots}) > 1
    saves = (
        "saves device memory for each group; trainers and engines form groups together, and "
        "must agree"
    )
    needs = (
        "NVLink between the trays of an NVL72 needs it; trainers and engines form groups "
        "together, and must agree"
    )
    return [
        *_accelerator(plan, role, allocator="PYTORCH_CUDA_ALLOC_CONF"),
        Setting(
            name="NCCL_CUMEM_ENABLE",
            value="1" if spans_nodes else "0",
            reason=needs if spans_nodes else saves,
            user_overrides=True,
        ),
        Setting(
            name="NCCL_NVLS_ENABLE",
            value="0",
            reason="NVLink SHARP takes device memory for each group",
            user_overrides=True,
        ),
    ]


def _rocm(plan: PlanView, role: Role) -> list[Setting]:
    chosen = [
        *_accelerator(plan, role, allocator="PYTORCH_HIP_ALLOC_CONF"),
        Setting(
            name="HIP_FORCE_DEV_KERNARG",
            value="1",
            reason="kernel arguments in device memory: shorter launches",
            user_overrides=True,
        ),
        Setting(
            name="HSA_NO_SCRATCH_RECLAIM",
            value="1",
            reason="no stalls while scratch memory is taken back",
            user_overrides=True,
        ),
        Setting(
            name="HSA_ENABLE_IPC_MODE_LEGACY",
            value="1",
            reason="ROCm 7.2 leaks memory that is shared by dma-buf",
            user_overrides=True,
        ),
        Setting(
            name="NCCL_MIN_NCHANNELS",
            value="112",
            reason="RCCL needs them to use all xGMI links of eight devices",
            user_overrides=True,
        ),
        Setting(
            name="NCCL_NVLS_ENABLE",
            value="0",
            reason="there is no NVLink SHARP; nobody need ask nvidia-smi for it",
        ),
        Setting(
            name="GPU_MAX_HW_QUEUES",
            value="2",
            reason="computation and communication side by side",
            user_overrides=True,
        ),
    ]
    if role == "engine":
        chosen += [
            Setting(
                name="SGLANG_USE_AITER",
                value="1",
                reason="AMD's kernels for attention and experts",
                user_overrides=True,
            ),
            Setting(
                name="SGLANG_MOE_PADDING",
                value="1",
                reason="expert weights padded off the memory channel conflicts",
                user_overrides=True,
            ),
            Setting(
                name="SGLANG_ROCM_FUSED_DECODE_MLA",
                value="1",
                reason="latent attention decodes in one kernel",
                user_overrides=True,
            ),
        ]
    return chosen
