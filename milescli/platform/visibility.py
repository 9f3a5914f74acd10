"""Interprets CUDA_, HIP_ and ROCR_VISIBLE_DEVICES: what they leave visible, and contradictions to
each other or the machine. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from milescli.core.errors import MachineError
from milescli.platform.machine import Device, Kind, is_accelerator, is_instance

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
CUDA, HIP, ROCR = VARIABLES
_NOTHING = ("", "-1", "NoDevFiles")


def set_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those of the three visibility variables that are set."""
    return {name: environ[name] for name in VARIABLES if name in environ}


def find_conflicts(
    kind: Kind, devices: Sequence[Device], environ: Mapping[str, str]
) -> list[MachineError]:
    """Return what is wrong with the variables on a machine with `devices`, each with a command that
    fixes it."""
    given = set_variables(environ)
    errors = find_contradictions(environ) if kind == "rocm" else []
    variable = _governing(kind, given)
    if variable is None:
        return errors + _mixed_devices_errors(HIP if kind == "rocm" else CUDA, devices)
    conflicts = _value_conflicts(variable, given[variable], devices)
    return errors + (
        conflicts or _mixed_devices_errors(variable, _chosen(given[variable], devices))
    )


def visible_devices(
    kind: Kind, devices: Sequence[Device], environ: Mapping[str, str]
) -> list[Device]:
    """Return the usable devices in the order of the variable. Raises the first conflict."""
    conflicts = find_conflicts(kind, devices, environ)
    if conflicts:
        raise conflicts[0]
    variable = _governing(kind, set_variables(environ))
    if variable is None:
        return list(devices)
    return _chosen(environ[variable], devices)


def named_devices(kind: Kind, environ: Mapping[str, str]) -> list[str] | None:
    """Return the indices or UUIDs in the variable that applies; empty if it hides all, None if none
    is set."""
    variable = _governing(kind, set_variables(environ))
    return None if variable is None else _entries(environ[variable])


def device_names(kind: Kind, places: Sequence[int], environ: Mapping[str, str]) -> list[str]:
    """Return the value of an actor's variable for the devices at `places` among the visible ones
    (the numbering of a plan): with CUDA_VISIBLE_DEVICES=4,6 here, place 1 is `6`. The names are
    indices or UUIDs, as in the variable."""
    entries = named_devices(kind, environ)
    assert entries is None or all(place < len(entries) for place in places), (
        f"{entries} has no places {places}"
    )
    return [str(place) if entries is None else entries[place] for place in places]


def _governing(kind: Kind, given: Mapping[str, str]) -> str | None:
    """Return the variable that applies: HIP reads HIP_ first, then CUDA_."""
    order = {"cuda": (CUDA,), "rocm": (HIP, CUDA), "cpu": ()}[kind]
    return next((name for name in order if name in given), None)


def find_contradictions(environ: Mapping[str, str]) -> list[MachineError]:
    """Return what is wrong with the variables on any machine, as ROCm, SGLang and Ray read them."""
    given = set_variables(environ)
    errors = []
    if ROCR in given:
        errors.append(
            MachineError(
                f"{ROCR} is set",
                why="it renumbers the devices below HIP, so every other variable refers to "
                "different devices; Ray rejects it",
                fix=f"unset {ROCR}" + ("" if HIP in given else f" && export {HIP}={given[ROCR]}"),
            )
        )
    if HIP in given and CUDA in given and _entries(given[HIP]) != _entries(given[CUDA]):
        errors.append(
            MachineError(
                f"{HIP} and {CUDA} contradict each other",
                why=f"{HIP}={given[HIP]} and {CUDA}={given[CUDA]}; HIP uses the first, some "
                "libraries the second",
                fix=f"unset {CUDA}",
            )
        )
    return errors


def _value_conflicts(variable: str, value: str, devices: Sequence[Device]) -> list[MachineError]:
    entries = _entries(value)
    every = _indices(
        [device for device in devices if is_accelerator(device) and not is_instance(device)]
    )
    repeated = sorted({entry for entry in entries if entries.count(entry) > 1})
    unknown = [entry for entry in entries if _match(entry, devices) is None]
    if repeated:
        return [
            MachineError(
                f"{variable}={value} names {repeated[0]} twice",
                why="then no device is visible",
                fix=f"export {variable}={every}",
            )
        ]
    cut = next(
        (device for device in devices if is_instance(device) and str(device.index) in unknown), None
    )
    if cut is not None:
        return [_mig_error(variable, devices)]
    if unknown:
        return [
            MachineError(
                f"{variable}={value} names a device that does not exist",
                why=f"`{unknown[0]}` is not one of {every or 'no devices'}; the devices listed "
                "after it become invisible without a message",
                fix=f"export {variable}={every}",
            )
        ]
    return []


def _mixed_devices_errors(variable: str, chosen: Sequence[Device]) -> list[MachineError]:
    """Return the errors if a run cannot use these devices together: they must be equal."""
    able = [device for device in chosen if is_accelerator(device)]
    if len(able) > 1 and any(map(is_instance, able)):
        return [_mig_error(variable, able)]
    if able and len(able) < len(chosen):
        others = ", ".join(
            f"{device.name} ({device.arch})" for device in chosen if device not in able
        )
        return [
            MachineError(
                f"{others} cannot train, but is visible next to {len(able)} x {able[0].name}",
                why="integrated and old GPUs count as devices too, so ranks would be placed on "
                "them",
                fix=f"export {variable}={_indices(able)}",
            )
        ]
    kinds = list(dict.fromkeys((device.name, device.arch) for device in able))
    if len(kinds) < 2:
        return []
    groups = [[device for device in able if (device.name, device.arch) == kind] for kind in kinds]
    return [
        MachineError(
            f"{' and '.join(f'{len(group)} x {group[0].name}' for group in groups)} are visible "
            "at the same time",
            why="ranks work in step on equal shares, so all of them would be as small and as "
            "slow as the weakest",
            fix=[
                f"export {variable}={_indices(group)}   # {group[0].name}"
                for group in sorted(groups, key=len, reverse=True)
            ],
        )
    ]


def _mig_error(variable: str, devices: Sequence[Device]) -> MachineError:
    """Return the error for GPUs in MIG mode, which are not whole devices."""
    parts = [device for device in devices if is_instance(device)]
    whole = [device for device in devices if is_accelerator(device) and not is_instance(device)]
    parents = sorted({device.index for device in parts})
    names = ", ".join(map(str, parents))
    return MachineError(
        f"GPU {names} is cut into instances (MIG)",
        why="CUDA shows a process at most one instance, and NCCL connects none: a run can use "
        "one instance, or whole GPUs",
        fix=[
            *([f"export {variable}={_indices(whole)}   # whole GPUs"] if whole else []),
            f"export {variable}={max(parts, key=lambda part: part.memory_bytes).uuid}   # the "
            "largest instance",
            f"sudo nvidia-smi -i {','.join(map(str, parents))} -mig 0   # makes the GPUs whole "
            "again",
        ],
    )


def _indices(devices: Sequence[Device]) -> str:
    return ",".join(str(device.index) for device in devices)


def _chosen(value: str, devices: Sequence[Device]) -> list[Device]:
    return [device for entry in _entries(value) if (device := _match(entry, devices)) is not None]


def _entries(value: str) -> list[str]:
    return [] if value.strip() in _NOTHING else [entry.strip() for entry in value.split(",")]


def _match(entry: str, devices: Sequence[Device]) -> Device | None:
    """Match a device by index, or by the beginning of a UUID, as CUDA does."""
    if entry.isdigit():
        return next(
            (
                device
                for device in devices
                if device.index == int(entry) and not is_instance(device)
            ),
            None,
        )
    matching = [
        device for device in devices if entry and device.uuid.lower().startswith(entry.lower())
    ]
    return matching[0] if len(matching) == 1 else None
