"""The environment variables that trainer ranks and engines need, per vendor, each with its reason. Composed here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from milescli.platform.machine import Kind

Role = Literal["trainer", "engine"]


class Placed(Protocol):
    """What must be known of a slot of a plan."""

    @property
    def node(self) -> int: ...


class Decided(Protocol):
    """What must be known of a plan."""

    @property
    def device_kind(self) -> Kind: ...
    @property
    def cpu_threads(self) -> int: ...
    @property
    def channel(self) -> Literal["tensor", "distributed"]: ...
    @property
    def slots(self) -> Sequence[Placed]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One variable, and why it is set."""

    name: str
    value: str
    reason: str


def trainer_environment(plan: Decided) -> dict[str, str]:
    """For every trainer rank of the plan."""
    return {setting.name: setting.value for setting in settings(plan, "trainer")}


def engine_environment(plan: Decided) -> dict[str, str]:
    """For every engine of the plan."""
    return {setting.name: setting.value for setting in settings(plan, "engine")}


def settings(plan: Decided, role: Role) -> list[Setting]:
    """All variables of one role, in a fixed order, no name twice."""
    chosen = [*_network(plan), *{"cpu": _cpu, "cuda": _cuda, "rocm": _rocm}[plan.device_kind](plan, role)]
    assert len({setting.name for setting in chosen}) == len(chosen), chosen
    return chosen


def _network(plan: Decided) -> list[Setting]:
    if len({slot.node for slot in plan.slots}) > 1:
        return []
    return [
        Setting(name="GLOO_SOCKET_IFNAME", value="lo", reason="one node: loopback, also where the host name does not resolve")
    ]


def _threads(count: int, reason: str) -> list[Setting]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return [Setting(name=name, value=str(count), reason=reason) for name in names]


def _cpu(plan: Decided, role: Role) -> list[Setting]:
    hidden = "a run on the CPU must not touch a GPU that happens to be there"
    return [
        *_threads(plan.cpu_threads, "the plan's share of the cores"),
        Setting(name="CUDA_VISIBLE_DEVICES", value="", reason=hidden),
        Setting(name="HIP_VISIBLE_DEVICES", value="", reason=hidden),
    ]


def _accelerator(plan: Decided, role: Role, *, allocator: str) -> list[Setting]:
    chosen = [
        *_threads(max(1, min(8, plan.cpu_threads)), "the host side of a device needs few threads"),
        Setting(name="TORCH_NCCL_ASYNC_ERROR_HANDLING", value="1", reason="a collective whose peer died ends with an error"),
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
            reason = "less fragmentation; not with the tensor channel, whose memory handles cannot be shared from such segments"
            chosen.append(Setting(name=allocator, value="expandable_segments:True", reason=reason))
    return chosen


def _cuda(plan: Decided, role: Role) -> list[Setting]:
    return [
        *_accelerator(plan, role, allocator="PYTORCH_CUDA_ALLOC_CONF"),
        Setting(name="NCCL_CUMEM_ENABLE", value="0", reason="engines and trainers form groups anew; saves memory per group"),
    ]


def _rocm(plan: Decided, role: Role) -> list[Setting]:
    chosen = [
        *_accelerator(plan, role, allocator="PYTORCH_HIP_ALLOC_CONF"),
        Setting(name="HIP_FORCE_DEV_KERNARG", value="1", reason="kernel arguments in device memory: shorter launches"),
        Setting(name="HSA_NO_SCRATCH_RECLAIM", value="1", reason="no stalls while scratch memory is taken back"),
        Setting(name="HSA_ENABLE_IPC_MODE_LEGACY", value="1", reason="ROCm 7.2 leaks memory that is shared by dma-buf"),
        Setting(name="NCCL_MIN_NCHANNELS", value="112", reason="RCCL needs them to use all xGMI links of eight devices"),
        Setting(name="NCCL_NVLS_ENABLE", value="0", reason="NVLink SHARP does not exist there"),
        Setting(name="GPU_MAX_HW_QUEUES", value="2", reason="computation and communication side by side"),
    ]
    if role == "engine":
        chosen += [
            Setting(name="SGLANG_USE_AITER", value="1", reason="AMD's kernels for attention and experts"),
            Setting(name="SGLANG_MOE_PADDING", value="1", reason="expert weights padded off the memory channel conflicts"),
        ]
    return chosen
