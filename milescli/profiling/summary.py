"""Summarises a profile in figures and words, from its traces, and stores the summary beside
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from milescli.checkpoint.run_dir import RunDir, write_json
from milescli.core.errors import MilesError
from milescli.core.units import format_bytes, format_duration
from milescli.platform.memory_record import last_sample
from milescli.profiling import traces
from milescli.profiling.request import SUMMARY, Request, State, folder_of

FORWARD, SAMPLING, RESULTS = "forward", "sampling", "handing out results"
SCHEDULER, IDLE, WEIGHTS = "scheduler", "idle", "taking weights"
LOOP = "event_loop"
"""Part of the name of the scheduler's main function; other threads do not count."""
_BY_FUNCTION = (
    (WEIGHTS, ("update_weights", "resume_memory", "release_memory", "flush_cache")),
    (RESULTS, ("process_batch_result",)),
    (SAMPLING, ("sample ", "Sampler", "sampling")),
    (FORWARD, ("forward_batch", "forward_", "model_runner", "run_batch")),
    (IDLE, ("on_idle", "recv_requests", "recv_", "sleep", "poll")),
)
"""The first entry that matches any function of a stack, with its file, counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShares:
    """Holds how a scheduler spent its time."""

    num_samples: int
    shares: dict[str, float]
    """0 to 1 by what it did, the largest first."""
    functions: dict[str, str]
    """The innermost function that was sampled most often, by kind of work."""


def read_stacks(text: str) -> Iterator[tuple[list[str], int]]:
    """Yield (functions, count) of each line; skips torn lines."""
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack and count.isdigit():
            yield stack.split(";"), int(count)


def split(text: str) -> StackShares:
    """Divide the time of a scheduler's loop; return an empty result if the loop was never
    sampled."""
    counts, leaves = Counter[str](), dict[str, Counter[str]]()
    for stack, count in read_stacks(text):
        places = [place for place, function in enumerate(stack) if LOOP in function]
        if not places:
            continue
        kind = kind_of(stack[places[0] + 1 :])
        counts[kind] += count
        leaves.setdefault(kind, Counter())[stack[-1]] += count
    total = counts.total()
    return StackShares(
        num_samples=total,
        shares={kind: count / total for kind, count in counts.most_common()},
        functions={kind: seen.most_common(1)[0][0] for kind, seen in leaves.items()},
    )


def kind_of(stack: list[str]) -> str:
    """Classify a stack by the functions below the scheduler's loop."""
    for kind, marks in _BY_FUNCTION:
        if any(mark in function for function in stack for mark in marks):
            return kind
    return SCHEDULER


MIN_SHARE = 0.005
"""Smallest share that is described in words."""
WORDS = {traces.WAITING: "waiting for rollouts and the driver"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessProfile:
    """Describes what one process did: a line of the page."""

    name: str
    """rank 0, engine 0."""
    shares: dict[str, float] = field(default_factory=dict)
    """0 to 1 by what it did, the largest first."""
    seconds: float = 0.0
    largest: dict[str, str] = field(default_factory=dict)
    """The operation or function that took most of the time, by kind of work."""
    file: str | None = None
    """File in the profile's folder: for chrome://tracing, or https://speedscope.app."""
    error: str | None = None
    """Why there is no profile."""
    tensors: list[dict[str, Any]] = field(default_factory=list)
    """With --memory: the largest tensors, by purpose, shape and type."""
    memory_error: str | None = None
    """Why its memory is not, or not completely, reported."""
    snapshot: str | None = None
    """With --memory, of a GPU: what torch wrote, for https://pytorch.org/memory_viz."""

    def words(self) -> str:
        """Format the part as one line."""
        if self.error is not None:
            return f"{self.name}: {self.error}"
        shares = []
        for what, share in self.shares.items():
            if share < MIN_SHARE:
                continue
            largest = f" ({self.largest[what]})" if what in self.largest else ""
            shares.append(f"{share:.0%} {WORDS.get(what, what)}{largest}".replace("%", " %"))
        return f"{self.name}: {', '.join(shares) or 'nothing was seen'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Holds all of a profile: summary.json."""

    folder: str
    first_step: int
    last_step: int
    seconds: float
    parts: list[ProcessProfile]
    resident_bytes: dict[str, int] = field(default_factory=dict)
    """With --memory: memory of each process on the driver's computer, largest first."""

    @property
    def errors(self) -> list[str]:
        """Return the errors of the parts that could not be profiled."""
        return [part.words() for part in self.parts if part.error is not None]

    @property
    def warnings(self) -> list[str]:
        """Return the errors, and those of memory snapshots."""
        parts = [part for part in self.parts if part.memory_error is not None]
        return [*self.errors, *(f"memory of {part.name}: {part.memory_error}" for part in parts)]

    def require_some(self) -> None:
        """Raise MilesError if nothing could be profiled."""
        if self.parts and len(self.errors) == len(self.parts):
            raise MilesError(
                "the profile is empty",
                why="; ".join(self.errors),
                fix=["repeat the command", f"ls {self.folder}"],
            )

    def lines(self) -> list[str]:
        """Format the summary for people."""
        steps = f"step {self.first_step}"
        if self.last_step > self.first_step:
            steps = f"steps {self.first_step} to {self.last_step}"
        lines = [f"{steps}, {format_duration(self.seconds)}"]
        for part in self.parts:
            if part.error is None:
                lines.append(part.words())
                lines += [f"  {_tensor(row)}" for row in part.tensors]
        if self.resident_bytes:
            sizes = self.resident_bytes.items()
            lines.append(
                "resident: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes)
            )
        files = [name for part in self.parts for name in (part.file, part.snapshot) if name]
        return [*lines, f"in {self.folder}: {', '.join(files) or 'nothing'}"]


def summarise(run: RunDir, wanted: Request, state: State) -> Summary:
    """Read the profile's files, and write the result to summary.json."""
    folder = folder_of(run, wanted.number)
    ranks = sorted(state.ranks.items(), key=lambda item: int(item[0]))
    engines = sorted(state.engines.items(), key=lambda item: int(item[0]))
    parts = [_rank(folder, number, reply) for number, reply in ranks]
    parts += [_engine(folder, number, reply) for number, reply in engines]
    resident = last_sample(run.path / "logs" / "latest") if wanted.memory else {}
    summary = Summary(
        folder=str(folder),
        first_step=state.first_step,
        last_step=state.last_step,
        seconds=state.seconds,
        parts=parts,
        resident_bytes=dict(sorted(resident.items(), key=lambda item: -item[1])),
    )
    write_json(folder / SUMMARY, asdict(summary))
    return summary


def _rank(folder: Path, number: str, reply: dict[str, Any]) -> ProcessProfile:
    name = f"rank {number}"
    if "file" not in reply:
        return ProcessProfile(name=name, error=str(reply.get("error")))
    try:
        events = traces.read_trace(folder / reply["file"])
    except (OSError, ValueError, KeyError) as error:
        return ProcessProfile(
            name=name, error=f"its trace cannot be read: {type(error).__name__}: {error}"
        )
    traced = traces.split(events, seconds=float(reply["seconds"]))
    memory = reply.get("memory", {})
    return ProcessProfile(
        name=name,
        shares={kind: own.seconds / traced.seconds for kind, own in traced.kinds.items()},
        seconds=traced.seconds,
        largest={
            kind: f"{own.largest[0]} {own.largest[1]:.2g} s"
            for kind, own in traced.kinds.items()
            if own.operations and not own.largest[0].startswith(traces.OWN_PREFIX)
        },
        file=reply["file"],
        tensors=memory.get("tensors", []),
        memory_error=memory.get("error"),
        snapshot=memory.get("snapshot"),
    )


def _engine(folder: Path, number: str, reply: dict[str, Any]) -> ProcessProfile:
    name = f"engine {number}"
    if "file" not in reply:
        return ProcessProfile(name=name, error=str(reply.get("error")))
    try:
        seen = split((folder / reply["file"]).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return ProcessProfile(name=name, error=f"its record cannot be read: {error}")
    if not seen.num_samples:
        return ProcessProfile(
            name=name, error="py-spy saw nothing of its scheduler", file=reply["file"]
        )
    return ProcessProfile(name=name, shares=seen.shares, largest=seen.functions, file=reply["file"])


def _tensor(row: dict[str, Any]) -> str:
    size, kind = format_bytes(row["size_bytes"]), f"{row['dtype']} on {row['device']}"
    return f"{size:>10}  {row['what']}, {row['count']} of {row['shape']} {kind}"
