"""Explains failures of vendors' tools and devices that do not respond, with fixes. Pure; `probe`
finds them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from milescli.core.errors import MachineError
from milescli.core.units import format_few
from milescli.platform.machine import Kind
from milescli.platform.visibility import CUDA, HIP, named_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFault:
    """Describes devices that exist and are not usable."""

    kind: Kind
    indices: tuple[int, ...] | None
    """Indices of the devices; None: all of this kind; (): the tool does not say which."""
    error: MachineError

    def concerns(self, environ: Mapping[str, str]) -> bool:
        """Return True if the visibility variables include any of them."""
        named = named_devices(self.kind, environ)
        if named is None or not named:
            return named is None
        return self.indices is None or any(str(index) in named for index in self.indices)


_Meaning = tuple[str, str, str, tuple[str, ...]]
"""(pattern in the tool's message, what, why, fixes)."""

_NVIDIA: tuple[_Meaning, ...] = (
    (
        r"version mismatch",
        "NVIDIA's driver and its libraries are of two versions",
        "the packages were upgraded and the module of before is still loaded",
        (
            "sudo reboot",
            "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia   # "
            "while nothing uses them",
        ),
    ),
    (
        r"communicate with the NVIDIA driver",
        "NVIDIA's driver is not loaded",
        "often after an update of the kernel, for which the module was not built",
        (
            "sudo modprobe nvidia   # loads it, or says why not",
            "sudo dkms autoinstall && sudo reboot",
        ),
    ),
    (
        r"device handle|GPU is lost|fallen off",
        "a GPU has fallen off the bus",
        "the driver lost it: heat, power, or a fault of the hardware (Xid 79 in the kernel's log)",
        ("sudo dmesg | grep -i xid", "sudo reboot"),
    ),
    (
        r"access blocked by the operating system",
        "Windows does not let WSL use the GPU",
        "the driver of Windows and the kernel of WSL do not fit, or Windows has updated one of "
        "them",
        ("wsl.exe --update && wsl.exe --shutdown   # in Windows, then start again",),
    ),
    (
        r"[Pp]ermission",
        "the GPUs may not be opened by this user",
        "their device files belong to others",
        ("ls -l /dev/nvidia*", "docker run --gpus all ..."),
    ),
    (
        r"NVML: Unknown Error",
        "this container has lost its GPUs",
        "the host reloaded its units or changed a container's limits, and the rules for devices "
        "were set anew without them",
        (
            "docker restart CONTAINER",
            "docker run --gpus all --device /dev/nvidiactl --device /dev/nvidia-uvm ...",
        ),
    ),
    (
        r"did not answer",
        "NVIDIA's driver hangs",
        "a GPU that no longer answers blocks every question to the driver",
        ("sudo dmesg | grep -iE 'nvrm|xid'", "sudo reboot"),
    ),
    (
        r"No devices were found",
        "NVIDIA's driver is loaded and has no GPU",
        "the driver gave up on all devices, or this container has access to none",
        ("sudo dmesg | grep -i nvrm", "docker run --gpus all ..."),
    ),
)
_AMD: tuple[_Meaning, ...] = (
    (
        r"[Pp]ermission|required groups",
        "the GPUs may not be opened by this user",
        "their device files belong to the groups render and video",
        ("sudo usermod -aG render,video $USER   # then log in again",),
    ),
    (
        r"did not answer",
        "AMD's driver hangs",
        "a GPU that no longer answers blocks every question to the driver",
        ("sudo dmesg | grep -i amdgpu", "sudo reboot"),
    ),
    (
        r"not initialized|not loaded|not found in modules|NOT_INIT|NO_DRV",
        "AMD's driver is not ready",
        "the module amdgpu is not loaded, or gave up on the GPUs",
        ("sudo modprobe amdgpu", "sudo dmesg | grep -i amdgpu"),
    ),
)


def tool_error(kind: Kind, problem: str) -> MachineError:
    """Make the error for a failed tool. `problem` is its message, prefixed by its name."""
    meanings, look = (
        (_NVIDIA, "nvidia-smi") if kind == "cuda" else (_AMD, "amd-smi static || rocm-smi")
    )
    for pattern, what, why, fixes in meanings:
        if re.search(pattern, problem):
            return MachineError(what, why=f"{why}; {problem}", fix=[*fixes, hide_command(kind)])
    vendor = "NVIDIA" if kind == "cuda" else "AMD"
    what = f"{vendor}'s driver is loaded, and its tool fails"
    return MachineError(what, why=problem, fix=[f"{look}   # shows the error", hide_command(kind)])


def is_permission(problem: str) -> bool:
    """Return True if AMD's tool only lacks permissions, which it takes from groups and the kernel
    may not require."""
    return bool(re.search(_AMD[0][0], problem))


def lost_device(kind: Kind, index: int, words: str, *, others: Sequence[int]) -> DeviceFault:
    """Make the fault for device `index`, which is listed but does not respond; `others` do."""
    look = "sudo dmesg | grep -i xid" if kind == "cuda" else "sudo dmesg | grep -i amdgpu"
    reset = (
        f"sudo nvidia-smi --gpu-reset -i {index}"
        if kind == "cuda"
        else f"sudo amd-smi reset --gpureset --gpu {index}"
    )
    error = MachineError(
        f"GPU {index} does not respond",
        why=f"the vendor's tool reports `{words}` for it; the driver lost it, or it needs a reset",
        fix=[f"{look}   # shows the reason", f"{reset} || sudo reboot", hide_command(kind, others)],
    )
    return DeviceFault(kind=kind, indices=(index,), error=error)


def inaccessible_files(paths: Sequence[Path], indices: tuple[int, ...] | None) -> DeviceFault:
    """Make the fault for AMD device files without permission to open them, and for the devices
    behind them."""
    error = MachineError(
        f"there is no permission to open {format_few([str(path) for path in paths], 3)}",
        why="AMD GPUs are used through these files, which belong to the groups render and video",
        fix=[
            "sudo usermod -aG render,video $USER   # then log in again",
            "docker run --device /dev/kfd --device /dev/dri --group-add video --group-add $(stat "
            f"-c %g {paths[0]}) ...",
            hide_command("rocm"),
        ],
    )
    return DeviceFault(kind="rocm", indices=indices, error=error)


def missing_device_file(path: Path, *, num_devices: int) -> DeviceFault:
    """Make the fault for devices that AMD's tool or driver lists although the file that programs
    use is missing."""
    error = MachineError(
        f"{path} does not exist",
        why=f"{num_devices} AMD devices are listed, but programs use them through this file; a "
        "container must have access to it",
        fix=[
            "docker run --device /dev/kfd --device /dev/dri --group-add video --group-add render "
            "...",
            hide_command("rocm"),
        ],
    )
    return DeviceFault(kind="rocm", indices=None, error=error)


def hide_command(kind: Kind, others: Sequence[int] = ()) -> str:
    """Return the command with which a run continues without the broken device."""
    variable = CUDA if kind == "cuda" else HIP
    what = "without it" if others else "without GPUs: run on the CPU"
    return f"export {variable}={','.join(map(str, others))}   # {what}"
