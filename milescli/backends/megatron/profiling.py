"""Profiles a trainer rank: a trace of some steps by torch's profiler, and the content of its
memory. Does not change what the rank computes, and reports failures without raising them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from milescli.core.events import WorkerMemory
from milescli.platform.memory_record import peak_resident_bytes

MAX_TENSORS = 20
"""Largest number of kinds of tensors to report, largest first."""
HISTORY = 100_000
"""Most allocations that torch records for a picture of a GPU's memory."""


@dataclass(slots=True)
class Trace:
    """Holds a trace in progress."""

    profiler: Any
    folder: Path
    began: float
    with_memory: bool


class ProfilingMixin:
    """Adds profiling methods to a trainer rank; all run on its work thread, between two steps."""

    _trace: Trace | None = None

    def start_profile(self: Any, folder: str, with_memory: bool) -> str | None:
        """Start a trace. Return the reason if that is impossible."""
        self.drop_profile()
        try:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self.device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
                if with_memory:
                    torch.cuda.memory._record_memory_history(max_entries=HISTORY)
            profiler = torch.profiler.profile(activities=kinds)
            profiler.start()
        except Exception as error:  # of torch or of a driver: the run goes on without
            self._stop_recording_allocations()
            return f"{type(error).__name__}: {error}"
        self._trace = Trace(profiler, Path(folder), time.monotonic(), with_memory)
        return None

    def stop_profile(self: Any) -> dict[str, Any]:
        """End the trace and write it; returns `file` and `seconds`, or `error`; and `memory`."""
        if (trace := self._trace) is None:
            return {"error": "the rank was replaced, or its trace could not begin"}
        self._trace = None
        file = trace.folder / f"rank_{self.rank}.json.gz"
        seconds = time.monotonic() - trace.began
        try:
            trace.profiler.stop()
            file.touch(mode=0o600)
            trace.profiler.export_chrome_trace(str(file))
            memory = {"memory": self._memory(trace.folder)} if trace.with_memory else {}
            return {"file": file.name, "seconds": seconds, **memory}
        except Exception as error:  # a full disk, or of torch: the run goes on
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            self._stop_recording_allocations()

    def drop_profile(self: Any) -> None:
        """End a trace whose result is no longer needed."""
        if self._trace is not None:
            trace, self._trace = self._trace, None
            try:
                trace.profiler.stop()
            except Exception as error:  # as above
                print(f"miles: a trace did not end: {error}", flush=True)
            self._stop_recording_allocations()

    def reset_peak_memory(self: Any) -> None:
        """Reset the peak memory."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def memory_used(self: Any) -> WorkerMemory:
        """Return the memory since `reset_peak_memory`: on a GPU the peak that torch allocated and
        the device's current total of all processes; on a CPU the peak resident size."""
        name = f"trainer rank {self.rank}"
        if self.device.type != "cuda":
            return WorkerMemory(worker=name, device="cpu", peak_bytes=peak_resident_bytes())
        free, total = torch.cuda.mem_get_info(self.device)
        return WorkerMemory(
            worker=name,
            device=str(self.device),
            peak_bytes=torch.cuda.max_memory_allocated(self.device),
            reserved_bytes=torch.cuda.max_memory_reserved(self.device),
            used_bytes=total - free,
            total_bytes=total,
        )

    def _memory(self: Any, folder: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        try:
            result["tensors"] = largest_tensors(names_of(self.policy))
            if self.device.type == "cuda":
                file = folder / f"rank_{self.rank}.memory.pickle"
                file.touch(mode=0o600)
                torch.cuda.memory._dump_snapshot(str(file))
                result["snapshot"] = file.name
        except Exception as error:  # as above: the trace is there
            result["error"] = f"{type(error).__name__}: {error}"
        return result

    def _stop_recording_allocations(self: Any) -> None:
        """Stop recording allocations: the records cost memory and time."""
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)


def names_of(model: Any) -> dict[int, str]:
    """Return address of each storage of a trained model's tensors -> its purpose."""
    names = dict[int, str]()
    for parameter in model.model.module.parameters():
        names[_place(parameter)] = "weights"
        if (gradient := getattr(parameter, "main_grad", None)) is not None:
            names[_place(gradient)] = "gradients"
    for part in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
        inner = getattr(part, "optimizer", part)
        for state in getattr(inner, "state", {}).values():
            for value in state.values():
                if torch.is_tensor(value) and value.dim():
                    names[_place(value)] = "optimizer"
    return names


def largest_tensors(names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the storages of live tensors by shape, dtype and purpose; each counts once."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    seen = set[int]()
    for tensor in _living_tensors():
        place = _place(tensor)
        if place in seen or not (size := tensor.untyped_storage().nbytes()):
            continue
        seen.add(place)
        what = names.get(place, "other")
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        key = (what, shape, str(tensor.dtype).removeprefix("torch."), str(tensor.device))
        kinds.setdefault(key, []).append(size)
    most = sorted(kinds.items(), key=lambda kind: -sum(kind[1]))[:MAX_TENSORS]
    return [
        {
            "what": what,
            "shape": shape,
            "dtype": dtype,
            "device": device,
            "count": len(sizes),
            "size_bytes": sum(sizes),
        }
        for (what, shape, dtype, device), sizes in most
    ]


def _living_tensors() -> Iterator[torch.Tensor]:
    """Yield the tensors that Python references, without those that only autograd's graph
    references."""
    for thing in gc.get_objects():
        try:
            if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided:
                yield thing
        except ReferenceError:  # a weak proxy of what is gone
            continue


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
