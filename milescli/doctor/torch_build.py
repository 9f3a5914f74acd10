"""Compares what torch reports about the machine with what the vendors' tools report: its build, the
devices it sees, the driver."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from milescli.core.pins import pin, pins, version_pin
from milescli.core.units import format_bytes
from milescli.doctor.finding import Finding, Status, fail, ok, skip, warn
from milescli.platform.machine import Machine

REINSTALL = "docker/install.sh .venv {kind}"
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950")
"""Architectures for which SGLang's kernels are built."""
MEMORY_SHARE = 0.9
"""Fraction of a device's memory, as the vendor's tool shows it, that torch should see: a little
less than all."""


def describe_torch() -> dict[str, Any]:
    """Describe torch's build and devices. Imports torch: runs in a separate process."""
    import torch

    devices: list[dict[str, object]] = []
    problem = ""
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            arch = (
                str(getattr(properties, "gcnArchName", "")).partition(":")[0]
                if torch.version.hip
                else f"sm_{properties.major}{properties.minor}"
            )
            devices.append(
                {"name": properties.name, "arch": arch, "memory_bytes": properties.total_memory}
            )
            torch.ones(8, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        problem = next(iter(str(error).splitlines()), type(error).__name__)
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "archs": torch.cuda.get_arch_list() if torch.version.cuda or torch.version.hip else [],
        "devices": devices,
        "problem": problem,
    }


def judge_trial(findings: list[Finding], machine: Machine) -> list[Finding]:
    """Turn the finding of the trial `torch` into findings for people; return the finding of a
    failed trial unchanged."""
    if findings[0].status is not Status.OK:
        return findings
    return judge_torch(json.loads(findings[0].what), machine)


def judge_torch(seen: Mapping[str, Any], machine: Machine) -> list[Finding]:
    """Compare `seen`, the result of `describe_torch`, with the machine. On a CPU any build is
    fine."""
    kind, what = machine.kind, f"torch {seen['version']}"
    built = "rocm" if seen["hip"] else "cuda" if seen["cuda"] else "cpu"
    if kind == "cpu":
        return ok("torch", what) + skip("driver", "there is no accelerator that miles can use")
    devices = machine.nodes[0].devices
    if built != kind:
        why = (
            f"the machine has {len(devices)} x {devices[0].name}, but this torch was built for "
            f"{built}"
        )
        return fail("torch", what, why=why, fix=REINSTALL.format(kind=kind))
    return [*_devices(seen, machine, what), *_driver(seen, machine)]


def _devices(seen: Mapping[str, Any], machine: Machine, what: str) -> list[Finding]:
    devices = machine.nodes[0].devices
    look = (
        "nvidia-smi -q -d ECC,PAGE_RETIREMENT" if machine.kind == "cuda" else "amd-smi static --ras"
    )
    if seen["problem"] or len(seen["devices"]) != len(devices):
        why = (
            f"the vendor's tool shows {len(devices)} devices, torch shows {len(seen['devices'])}"
            + (f": {seen['problem']}" if seen["problem"] else "")
        )
        access = (
            "ls -l /dev/nvidia*"
            if machine.kind == "cuda"
            else "ls -l /dev/kfd /dev/dri; groups   # render and video are needed"
        )
        return fail(
            "torch", f"{what} does not see the existing devices", why=why, fix=[access, look]
        )
    for device, own in zip(devices, seen["devices"], strict=True):
        if device.arch and own["arch"] and device.arch != own["arch"]:
            why = (
                f"device {device.index} is {device.arch} for the vendor's tool and {own['arch']} "
                "for torch: they are numbered differently"
            )
            return fail(
                "torch",
                f"{what} and the vendor's tool disagree",
                why=why,
                fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            )
        if own["memory_bytes"] < MEMORY_SHARE * device.memory_bytes:
            why = (
                f"{format_bytes(own['memory_bytes'])} of {format_bytes(device.memory_bytes)}: a "
                "partition, or other limits"
            )
            return warn(
                "torch", f"torch sees less memory of device {device.index}", why=why, fix=look
            )
    arch = devices[0].arch
    if seen["archs"] and arch and not _has_code(arch, seen["archs"]):
        why = f"it has code for {', '.join(seen['archs'])}, but the devices are {arch}"
        return fail(
            "torch",
            f"{what} has no kernels for {arch}",
            why=why,
            fix=REINSTALL.format(kind=machine.kind),
        )
    if arch and arch not in ARCHS:
        why = f"{arch} is not one of {', '.join(ARCHS)}"
        return warn(
            "torch",
            f"{what}, {arch}",
            why=why,
            fix="miles launch --recipe quickstart   # try a small run",
        )
    return ok("torch", f"{what} sees {len(devices)} x {arch or devices[0].name}")


def _has_code(arch: str, built: list[str]) -> bool:
    """Return True if the build has code for the architecture. Binaries run on later minor versions
    of the same major; PTX (compute_) on all later ones."""
    if not arch.startswith("sm_"):
        return arch in [entry.partition(":")[0] for entry in built]
    own = int(arch[3:].rstrip("af"))
    for entry in built:
        kind, _, number = entry.partition("_")
        if number.rstrip("af").isdigit():
            other = int(number.rstrip("af"))
            if other <= own and (kind == "compute" or other // 10 == own // 10):
                return True
    return False


def _driver(seen: Mapping[str, Any], machine: Machine) -> list[Finding]:
    """Check the driver. CUDA: it must support torch's CUDA version. ROCm: the runtime should be the
    one that torch was built for."""
    if machine.kind == "cuda":
        major = str(seen["cuda"]).partition(".")[0]
        what = (
            f"driver {machine.driver_version or 'unknown'}, supports CUDA "
            f"{machine.runtime_version or 'unknown'}; torch needs {seen['cuda']}"
        )
        branch = machine.driver_version.partition(".")[0]
        oldest = pins().get(f"driver_cuda_{major}")
        if oldest and branch.isdigit() and int(branch) < int(oldest):
            why = f"CUDA {major} needs a driver of branch {oldest} or newer"
            return fail(
                "driver",
                what,
                why=why,
                fix=f"apt-get install --only-upgrade cuda-drivers-{oldest}   # then reboot",
            )
        return ok("driver", what)
    what = (
        f"amdgpu {machine.driver_version or 'unknown'}, ROCm "
        f"{machine.runtime_version or 'unknown'}; torch was built for {seen['hip']}"
    )
    own, wanted = _release(machine.runtime_version), _release(str(seen["hip"]))
    if own and own < version_pin("rocm_oldest"):
        why = f"the oldest that this torch runs on is {pin('rocm_oldest')}"
        return fail(
            "driver",
            what,
            why=why,
            fix="docker run ... an SGLang image for ROCm   # includes its own",
        )
    if own and wanted and own != wanted:
        why = "libraries of two releases of ROCm in one process may not find each other's symbols"
        return warn(
            "driver",
            what,
            why=why,
            fix="pip install torch --index-url "
            f"https://download.pytorch.org/whl/rocm{own[0]}.{own[1]}",
        )
    return ok("driver", what)


def _release(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    return (
        (int(parts[0]), int(parts[1]))
        if len(parts) >= 2 and parts[0].isdigit() and parts[1].isdigit()
        else None
    )
