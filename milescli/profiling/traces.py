"""Reads a trace of a trainer rank by torch's profiler into seconds by kind of work. Pure; reads the
JSON of Chrome's trace viewer."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MATMUL, ATTENTION, OPTIMIZER, COLLECTIVES = "matmul", "attention", "optimizer", "collectives"
WEIGHTS, PYTHON, OTHER, WAITING = "sending weights", "Python", "other operations", "waiting"
DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU does, in a trace."""
OWN_PREFIX = "miles: "
"""Prefix of the ranges of the rank's own calls."""
_OF_COLLECTIVES = ("nccl", "gloo:", "c10d::", "rccl")
_WAITING_FUNCTIONS = ("parallelregion", "asynccommunication")
"""Parts of names of Megatron's functions that wait for other ranks; products in them count as
waiting."""
_OF_ATTENTION = ("attention", "flash", "fmha", "deltarule", "attn", "ssd")
_OF_MATMUL = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul")
_OF_MATMUL += ("linear", "gemm", "cutlass", "cublas", "convolution", "conv2d", "nvjet", "cijk")
_OF_OPTIMIZER = ("optimizer.", "multi_tensor", "fused_adam", "adamw")


@dataclass(slots=True)
class Kind:
    """Holds the time of one kind of work."""

    seconds: float = 0.0
    operations: dict[str, float] = field(default_factory=dict)
    """Name -> seconds that it took itself."""

    @property
    def largest(self) -> tuple[str, float]:
        """Return the operation that took longest, and its seconds."""
        return max(self.operations.items(), key=lambda item: item[1], default=("", 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTimes:
    """Holds how a rank spent its time."""

    seconds: float
    """Seconds from the start of the trace to its end."""
    kinds: dict[str, Kind]
    """Times by kind of work, the longest first; they sum to the trace."""
    is_device: bool
    """True for a GPU's kernels; else the operations of the rank's process are shown."""


def read_trace(file: Path) -> list[dict[str, Any]]:
    """Return the events of a trace that take time. Raises OSError or ValueError if the file is not
    a trace."""
    try:
        with gzip.open(file, "rt", encoding="utf-8", errors="replace") as text:
            events = json.load(text)["traceEvents"]
    except (EOFError, zlib.error) as error:  # torn by a full disk
        raise ValueError(str(error)) from error
    return [event for event in events if event.get("ph") == "X"]


def split(events: Sequence[Mapping[str, Any]], *, seconds: float) -> TraceTimes:
    """Divide a trace of `seconds` by kind of work. The rest is waiting: for rollouts, for the
    driver, and on a GPU for the rank's process."""
    device = [event for event in events if event.get("cat") in DEVICE_KINDS]
    kinds = _of_device(device) if device else _of_process(events)
    busy = _union(device) if device else sum(kind.seconds for kind in kinds.values())
    kinds[WAITING] = Kind(max(seconds - busy, 0.0))
    ordered = sorted(kinds.items(), key=lambda item: -item[1].seconds)
    return TraceTimes(seconds=seconds, kinds=dict(ordered), is_device=bool(device))


def _of_device(events: Iterable[Mapping[str, Any]]) -> dict[str, Kind]:
    """Sum the kernels by kind; those on several streams count each, as few run at once."""
    kinds: dict[str, Kind] = {}
    for event in events:
        name = str(event["name"])
        kind = "copies" if event["cat"] != "kernel" else kind_of([name])
        _add(kinds, kind, name, float(event["dur"]) / 1e6)
    return kinds


def _of_process(events: Iterable[Mapping[str, Any]]) -> dict[str, Kind]:
    """Sum for each event the time in which no inner event ran, by what contains it."""
    kinds: dict[str, Kind] = {}
    threads: dict[object, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads.setdefault(event.get("tid"), []).append(event)
    main = max(threads.values(), key=_time_within, default=[])
    for names, own in _self_times(main):
        _add(kinds, kind_of(names), names[-1], own / 1e6)
    return kinds


def _time_within(events: Sequence[Mapping[str, Any]]) -> float:
    return sum(float(e["dur"]) for e in events if str(e["name"]).startswith(OWN_PREFIX))


def _self_times(events: Sequence[Mapping[str, Any]]) -> Iterable[tuple[list[str], float]]:
    """Yield (names from the outermost to the event itself, microseconds of its own), of one
    thread."""
    open_: list[tuple[str, float, list[float]]] = []

    def close() -> tuple[list[str], float]:
        name, _, left = open_.pop()
        return [*(one[0] for one in open_), name], max(left[0], 0.0)

    for event in sorted(events, key=lambda one: (float(one["ts"]), -float(one["dur"]))):
        start, length = float(event["ts"]), float(event["dur"])
        while open_ and open_[-1][1] <= start + 1e-3:
            yield close()
        if open_:
            open_[-1][2][0] -= length
        open_.append((str(event["name"]), start + length, [length]))
    while open_:
        yield close()


def kind_of(names: Sequence[str]) -> str:
    """Classify an operation by its own name and its enclosing ones, outermost first."""
    for name in reversed([name.lower() for name in names]):
        if name.startswith(_OF_COLLECTIVES) or any(part in name for part in _WAITING_FUNCTIONS):
            return COLLECTIVES
        if any(part in name for part in _OF_ATTENTION):
            return ATTENTION
        if any(part in name for part in _OF_MATMUL):
            return MATMUL
        if any(part in name for part in _OF_OPTIMIZER):
            return OPTIMIZER
        if name.startswith(OWN_PREFIX + "publishing"):
            return WEIGHTS
    return PYTHON if names[-1].startswith(OWN_PREFIX) else OTHER


def _add(kinds: dict[str, Kind], kind: str, name: str, seconds: float) -> None:
    own = kinds.setdefault(kind, Kind())
    own.seconds += seconds
    own.operations[name] = own.operations.get(name, 0.0) + seconds


def _union(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds in which at least one of them ran."""
    total, until = 0.0, float("-inf")
    for start, length in sorted((float(e["ts"]), float(e["dur"])) for e in events):
        total += max(start + length - max(start, until), 0.0)
        until = max(until, start + length)
    return total / 1e6
