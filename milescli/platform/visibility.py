"""CUDA_, HIP_ and ROCR_VISIBLE_DEVICES: what they leave visible, and where they contradict each other or the machine. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from milescli.core.errors import MachineError
from milescli.platform.machine import Device, Kind

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
CUDA, HIP, ROCR = VARIABLES
_NOTHING = ("", "-1", "NoDevFiles")


def set_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of the three that are set."""
    return {name: environ[name] for name in VARIABLES if name in environ}


def find_conflicts(kind: Kind, devices: Sequence[Device], environ: Mapping[str, str]) -> list[MachineError]:
    """What is wrong with the variables on a machine that has `devices`, each with the command that mends it."""
    given = set_variables(environ)
    errors = find_contradictions(environ) if kind == "rocm" else []
    variable = _governing(kind, given)
    if variable is None:
        return errors
    return errors + _value_conflicts(variable, given[variable], devices)


def visible_devices(kind: Kind, devices: Sequence[Device], environ: Mapping[str, str]) -> list[Device]:
    """The devices that may be used, in the order that the variable gives. Raises the first conflict."""
    conflicts = find_conflicts(kind, devices, environ)
    if conflicts:
        raise conflicts[0]
    variable = _governing(kind, set_variables(environ))
    if variable is None:
        return list(devices)
    return [device for entry in _entries(environ[variable]) if (device := _match(entry, devices)) is not None]


def device_names(kind: Kind, places: Sequence[int], environ: Mapping[str, str]) -> list[str]:
    """What an actor's variable must say for the devices at `places` among those that are visible here (a plan counts so): with
    CUDA_VISIBLE_DEVICES=4,6 here, place 1 is `6`. Indices or UUIDs, as the variable has them."""
    variable = _governing(kind, set_variables(environ))
    entries = None if variable is None else _entries(environ[variable])
    assert entries is None or all(place < len(entries) for place in places), f"{variable}={entries} has no places {places}"
    return [str(place) if entries is None else entries[place] for place in places]


def _governing(kind: Kind, given: Mapping[str, str]) -> str | None:
    """The variable that counts: HIP reads HIP_ first, then CUDA_."""
    order = {"cuda": (CUDA,), "rocm": (HIP, CUDA), "cpu": ()}[kind]
    return next((name for name in order if name in given), None)


def find_contradictions(environ: Mapping[str, str]) -> list[MachineError]:
    """What is wrong with the variables whatever the devices are, as ROCm, SGLang and Ray read them."""
    given = set_variables(environ)
    errors = []
    if ROCR in given:
        errors.append(
            MachineError(
                f"{ROCR} is set",
                why="it renumbers the devices below HIP, so every other variable means other devices; Ray refuses it",
                fix=f"unset {ROCR}" + ("" if HIP in given else f" && export {HIP}={given[ROCR]}"),
            )
        )
    if HIP in given and CUDA in given and _entries(given[HIP]) != _entries(given[CUDA]):
        errors.append(
            MachineError(
                f"{HIP} and {CUDA} contradict each other",
                why=f"{HIP}={given[HIP]} and {CUDA}={given[CUDA]}; HIP obeys the first, some libraries the second",
                fix=f"unset {CUDA}",
            )
        )
    return errors


def _value_conflicts(variable: str, value: str, devices: Sequence[Device]) -> list[MachineError]:
    entries = _entries(value)
    every = ",".join(str(device.index) for device in devices)
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
    if unknown:
        return [
            MachineError(
                f"{variable}={value} names a device that is not there",
                why=f"`{unknown[0]}` is none of {every or 'no devices'}; devices named after it become invisible without a word",
                fix=f"export {variable}={every}",
            )
        ]
    return []


def _entries(value: str) -> list[str]:
    return [] if value.strip() in _NOTHING else [entry.strip() for entry in value.split(",")]


def _match(entry: str, devices: Sequence[Device]) -> Device | None:
    """By index, or by the beginning of a UUID, as CUDA does."""
    if entry.isdigit():
        return next((device for device in devices if device.index == int(entry)), None)
    found = [device for device in devices if entry and device.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None
