"""The journal of a run: a thread writes groups to journal/ when they are finished, and a resumed
run takes them from there. Whatever the disk does, the run continues. `rollout.journal` decides
which groups may be taken; `identity_of` computes which run a journal belongs to, from the settings
that decide what is sampled, and those that decide the last bits of the weights."""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from milescli.checkpoint.base import MANIFEST_NAME
from milescli.checkpoint.journal import (
    RecordLocation,
    RecordWriter,
    intact_records,
    read_record,
    retain_records,
)
from milescli.checkpoint.store import CheckpointStore
from milescli.core.concurrency import in_thread
from milescli.core.errors import MachineError
from milescli.core.events import EventBus, Notice
from milescli.core.files import read_json
from milescli.core.types import Group, Prompt
from milescli.core.units import format_bytes
from milescli.rollout.collect.group_record import (
    FIELDS,
    GroupHead,
    decode_group,
    encode_group,
    read_head,
)
from milescli.rollout.collect.journal import BatchRecord, UsableRecords, select_usable
from milescli.runtime.recording import run_records
from milescli.runtime.saving import version_of
from milescli.runtime.spec import RunSpec

SUFFIX = ".journal"
MAX_WAITING = 8192
"""Largest number of records in the queue; with more, the disk is too slow for this run."""
CLOSE_TIMEOUT_S = 10.0
WRITTEN_TIMEOUT_S = 1.0
_BAD_RECORD = (OSError, KeyError, TypeError, ValueError)
"""Exceptions of reading an invalid record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identifies the run of a journal: the settings that decide what is sampled, and those that
    decide the last bits of the weights."""

    past: str
    """Hash of what decides what is sampled: if it differs, no group can be taken."""
    line: str
    """Hash of what else decides the last bits of the weights: if it differs, groups sampled by
    later weights cannot be taken."""
    since: int = 0
    """Step of the oldest checkpoint from which these weights were trained under this `line` alone:
    a run that continues from an older one trains other weights."""
    started: float = 0.0
    """Unix time of the attempt's start: files of its processes belong together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestCheckpoint:
    """Describes the oldest checkpoint from which a run may be resumed."""

    step: int
    position: int
    """Position of the source at that checkpoint."""


@dataclass(slots=True)
class _Segment:
    """Describes one file, which has the groups that finished between two checkpoints."""

    path: Path
    size: int = 0
    last_position: int = -1
    last_step: int = -1


@dataclass(slots=True)
class _Contents:
    """Holds what the files contain."""

    heads: dict[int, GroupHead] = field(default_factory=dict)
    places: dict[int, RecordLocation] = field(default_factory=dict)
    batches: dict[int, tuple[BatchRecord, RecordLocation]] = field(default_factory=dict)
    recorded_by: dict[int, Identity | None] = field(default_factory=dict)
    """Position -> identity of the attempt that recorded its group."""
    step_of: dict[int, int] = field(default_factory=dict)
    """Position -> step of the batch that contains it."""
    identity: Identity | None = None
    """Identity in the newest file; None if there is no file."""
    is_one_past: bool = True

    def add(self, head: dict[str, Any], place: RecordLocation) -> None:
        """Add a record; a later record of the same position or step replaces an earlier one."""
        if head["kind"] == "begin":
            # a file without `since` is of an older miles, so that its `line` differs
            identity = Identity(past=head["past"], line=head["line"], since=head.get("since", 0))
            self.is_one_past &= self.identity is None or self.identity.past == identity.past
            self.identity = identity
        elif head["kind"] == "batch":
            batch = BatchRecord(**head["batch"])
            self.batches[batch.step] = batch, place
            self.step_of |= dict.fromkeys(batch.positions, batch.step)
        else:
            group = read_head(head)
            self.heads[group.position], self.places[group.position] = group, place
            self.recorded_by[group.position] = self.identity
            # a batch that had another group in this place is not that batch any more
            self.batches.pop(self.step_of.pop(group.position, -1), None)

    def reproduced(self, line: str, *, step: int) -> set[int]:
        """Return the positions of the groups whose weights a run with this `line` trains again, bit
        for bit, from the checkpoint of `step`."""
        return {
            position
            for position, identity in self.recorded_by.items()
            if identity is not None and identity.line == line and identity.since <= step
        }


class SampleJournal:
    """Implements milescli.rollout.collect.journal.Journal. Belongs to one event loop; its files
    belong to its thread from the first record on."""

    def __init__(
        self,
        folder: Path,
        *,
        identity: Identity,
        bound_bytes: float,
        max_staleness: int,
        oldest_kept: Callable[[], OldestCheckpoint | None],
        warn: Callable[[str], None],
    ) -> None:
        """Set up the journal. `oldest_kept`, `warn`: called in the journal's thread; the first may
        raise OSError."""
        self._folder, self.identity, self.bound_bytes = folder, identity, bound_bytes
        self._max_staleness, self.oldest_kept, self._warn = max_staleness, oldest_kept, warn
        self._heads: dict[int, GroupHead] = {}
        self._places: dict[int, RecordLocation] = {}
        self._batches: dict[int, BatchRecord] = {}
        self._segments: list[_Segment] = []
        self._writer: RecordWriter | None = None
        self._let_go = self._warned = False
        self.num_lost = 0
        """Records that could not be read."""
        self.on_checkpoint: Callable[[], None] | None = None
        """Told when a checkpoint begins."""
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ before the run

    def begin(self) -> None:
        """Begin the journal of a new run, and remove older files, which belong to no run that can
        be resumed."""
        for path in self._files():
            path.unlink(missing_ok=True)
        self._segments.clear()

    def load(
        self, *, step: int, version: int, position: int, taken: Collection[int] = ()
    ) -> str | None:
        """Find the groups that a run may use when it continues from the checkpoint of `step`, whose
        weights are `version`, with the source at `position` and some later positions `taken`;
        remove the rest. Return a sentence for the user, or None. Raises OSError if something cannot
        be removed."""
        found = self._contents()
        self.identity = replace(self.identity, since=step)
        if found.identity is None:
            return None
        if not found.is_one_past or found.identity.past != self.identity.past:
            self.begin()
            return (
                "the journal belongs to another history (recipe, data or the form of records "
                "changed): unfinished work is sampled again"
            )
        if found.identity.line == self.identity.line:
            self.identity = replace(self.identity, since=min(step, found.identity.since))
        reproduced = found.reproduced(self.identity.line, step=step)
        take = select_usable(
            found.heads,
            [batch for batch, _ in found.batches.values()],
            step=step,
            version=version,
            position=position,
            reproduced=reproduced,
        )
        self._remove_others(found, take)
        ahead = [place for place in take.groups - set(taken) if place >= position]
        self._heads = {place: found.heads[place] for place in ahead}
        self._places = {place: found.places[place] for place in ahead}
        self._batches = {n: batch for n, batch in take.batches.items() if n > step}
        left = found.heads.keys() - take.groups
        if not ahead and not left:
            return None
        why = (
            "their steps are incomplete in it"
            if left <= reproduced
            else "layout, versions or machine changed"
        )
        return (
            f"the journal has {len(ahead)} groups that no step before {step + 1} used: they are "
            "not sampled again"
            + (f"; {len(left)} of later weights are not used, because {why}" if left else "")
        )

    def _contents(self) -> _Contents:
        found = _Contents()
        records = list[tuple[tuple[float, bool], dict[str, Any], RecordLocation]]()
        for number, path in enumerate(self._files()):
            segment, started = _Segment(path, size=path.stat().st_size), float(number)
            self._segments.append(segment)
            with suppress(*_BAD_RECORD):  # what comes after it is left out
                for place, head in intact_records(path):
                    started = head.get("started") or started
                    # an attempt records a batch when it has its groups, maybe in other files
                    records.append(((started, head["kind"] == "batch"), head, place))
                    _note(segment, head)
        with suppress(*_BAD_RECORD):
            for _, head, place in sorted(records, key=lambda record: record[0]):
                found.add(head, place)
        return found

    def _remove_others(self, found: _Contents, take: UsableRecords) -> None:
        keep = {found.places[position] for position in take.groups}
        keep |= {found.batches[step][1] for step in take.batches}
        if len(keep) == len(found.places) + len(found.batches):
            return
        for segment in self._segments:
            begin = [place for place, head in _heads(segment.path) if head["kind"] == "begin"]
            ours = [place for place in keep if place.path == segment.path]
            retain_records(segment.path, begin + sorted(ours, key=lambda place: place.offset))
            segment.size = segment.path.stat().st_size
        # where they are has changed
        for segment in self._segments:
            for place, head in _heads(segment.path):
                if head["kind"] == "group":
                    found.places[head["position"]] = place

    def _files(self) -> list[Path]:
        """Return its own files, and those of collecting processes (`part`)."""
        return sorted(self._folder.rglob(f"*{SUFFIX}"))

    # ------------------------------------------------------------------ what was sampled before

    def batch(self, step: int, *, start: int) -> BatchRecord | None:
        batch = self._batches.get(step)
        if batch is None or batch.start != start:
            return None
        fits = all(self.has_group(step, position) for position in batch.positions)
        return batch if fits else None

    def recorded(self, step: int, position: int) -> tuple[GroupHead, RecordLocation] | None:
        """Return where the group of this position is, if `step` may use it."""
        fits = self.has_group(step, position)
        return (self._heads[position], self._places[position]) if fits else None

    def adopt(self, position: int, head: GroupHead, place: RecordLocation) -> None:
        """Read the group of this position from `place` from now on."""
        self._heads[position], self._places[position] = head, place

    def has_group(self, step: int, position: int) -> bool:
        if position not in self._places:
            return False
        head, version = self._heads[position], version_of(step - 1)
        return version - self._max_staleness <= head.oldest and head.newest <= version

    async def group(self, step: int, position: int, prompt: Prompt) -> Group | None:
        if not self.has_group(step, position):
            return None
        place = self._places[position]
        try:
            head, body = await in_thread(lambda: read_record(place))
            return decode_group(head, body, prompt=prompt)
        except _BAD_RECORD as error:
            self.num_lost += 1
            others = self.distrust() - 1
            self._warn(
                f"{place.path} cannot be read any more ({error}): its samples are generated again"
                + f", and those of {others} groups that were recorded with them" * (others > 0)
            )
            return None

    def distrust(self) -> int:
        """Ignore all recorded groups: if one group must be sampled again, it differs, and so do all
        later groups. Return the number of ignored groups."""
        num_groups = len(self._places)
        self._places.clear()
        self._batches.clear()
        self._do(self._start_again)
        return num_groups

    # ------------------------------------------------------------------ parts of other processes

    def part(self, name: str) -> Path:
        """Return the folder of another process of this run, which writes its groups there."""
        return self._folder / name

    def read_part(self, name: str) -> None:
        """Add the groups that another process wrote before it ended. Blocks."""
        for path in sorted(self.part(name).glob(f"*{SUFFIX}")):
            segment = _Segment(path, size=path.stat().st_size)
            for place, head in _heads(path):
                _note(segment, head)
                if head["kind"] == "group":
                    self.adopt(head["position"], read_head(head), place)
            self._do(lambda segment=segment: self._add_segment(segment))

    def _add_segment(self, segment: _Segment) -> None:
        if all(segment.path != known.path for known in self._segments):
            self._segments.insert(0, segment)

    # ------------------------------------------------------------------ what is sampled now

    def record_group(self, position: int, group: Group) -> None:
        def write() -> None:
            head, parts = encode_group(position, group)
            self._append({"kind": "group", **head}, parts)

        self._do(write)

    def record_batch(self, batch: BatchRecord) -> None:
        self._do(lambda: self._append({"kind": "batch", "batch": asdict(batch)}))

    def checkpoint(self) -> None:
        """Start a new file for a checkpoint: flush the files to disk, remove those that no resume
        can need, and write again if writing had failed before."""
        self._do(self._next_segment)
        if self.on_checkpoint is not None:
            self.on_checkpoint()

    def wait_written(self, timeout_s: float = WRITTEN_TIMEOUT_S) -> bool:
        """Wait until the queue is written to files, which survive this process, at most
        `timeout_s`. Returns True if it is. Blocks."""
        if self._thread is None:
            return True
        written = threading.Event()
        self._queue.put(written.set)
        return written.wait(timeout_s)

    def discard(self) -> None:
        """Remove all files, also those that other processes are writing, so that a resumed run
        samples again. For a run that ends."""
        self._do(self._end_segment)
        self._do(self.begin)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the queued records, for at most `timeout_s`."""
        if self._thread is not None:
            self._do(self._end_segment)
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _do(self, call: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="miles-journal", daemon=True)
            self._thread.start()
        if self._queue.qsize() < MAX_WAITING:
            self._queue.put(call)
        else:
            self._give_up(f"the disk stores them too slowly, and {MAX_WAITING} are waiting")

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception as error:  # whatever it is, the run does not need the journal
                self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        """Write nothing until the next checkpoint."""
        self._let_go = True
        if not self._warned:
            self._warned = True
            self._warn(
                f"{self._folder} stores no more samples until the next checkpoint ({why}); the "
                "run continues, and samples that are not stored are sampled again after a resume"
            )

    def _append(self, head: dict[str, Any], parts: list[bytes] | None = None) -> None:
        if self._let_go:
            return
        size = sum(segment.size for segment in self._segments) + sum(map(len, parts or []))
        if size > self.bound_bytes:
            bound = format_bytes(int(self.bound_bytes))
            self._give_up(f"it would be larger than fault.journal_gib, {bound}")
            return
        writer = self._writer or self._new_segment()
        writer.append(head, parts or [])
        self._segments[-1].size = writer.size
        _note(self._segments[-1], head)

    def _new_segment(self) -> RecordWriter:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = 1 + max((int(path.stem) for path in self._files()), default=0)
        writer = RecordWriter(self._folder / f"{number:06d}{SUFFIX}")
        writer.append({"kind": "begin", **asdict(self.identity)})
        self._segments.append(_Segment(writer.path, size=writer.size))
        self._writer = writer
        return writer

    def _end_segment(self) -> None:
        if (writer := self._writer) is not None:
            self._writer = None
            writer.close()

    def _next_segment(self) -> None:
        self._end_segment()
        with suppress(OSError, ValueError, KeyError):  # a checkpoint that is just removed
            if (oldest := self.oldest_kept()) is not None:
                self._forget(oldest)
        self._let_go = False

    def _forget(self, oldest: OldestCheckpoint) -> None:
        for segment in list(self._segments):
            if segment.last_position < oldest.position and segment.last_step <= oldest.step:
                segment.path.unlink(missing_ok=True)
                self._segments.remove(segment)

    def _start_again(self) -> None:
        """Remove the known files, but not those that other processes are writing."""
        self._end_segment()
        for segment in self._segments:
            segment.path.unlink(missing_ok=True)
        self._segments.clear()


def _heads(path: Path) -> Iterator[tuple[RecordLocation, dict[str, Any]]]:
    with suppress(*_BAD_RECORD):
        yield from intact_records(path)


def _note(segment: _Segment, head: dict[str, Any]) -> None:
    if head["kind"] == "group":
        segment.last_position = max(segment.last_position, head["position"])
    elif head["kind"] == "batch":
        segment.last_step = max(segment.last_step, head["batch"]["step"])


_OF_WEIGHTS = ("engines", "weights", "parallel")
"""Sections that may change at a resume, and that change the last bits of weights."""
_OF_SAMPLES = ("train.on_policy",)
"""Keys that may change at a resume, and that decide which log-probs an engine returns: a step of
`exact` cannot be trained on those of `auto`."""


async def open_journal(
    spec: RunSpec, store: CheckpointStore, *, bus: EventBus
) -> SampleJournal | None:
    """Return the journal of an attempt; None if `fault.journal_gib` is 0. Reports to the user what
    a resumed run found in it. Raises MachineError if files of another past cannot be removed."""
    loop, checkpoint = asyncio.get_running_loop(), spec.checkpoint

    def tell(text: str, level: str) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(bus.emit, Notice(text=text, level=level))

    def opened() -> SampleJournal | None:
        bound_gib = spec.recipe.fault.journal_gib
        journal = SampleJournal(
            spec.run.journal_dir,
            identity=identity_of(spec),
            bound_bytes=bound_gib * 1024**3,
            max_staleness=spec.recipe.rollout.max_staleness,
            oldest_kept=lambda: _oldest_kept(store),
            warn=lambda text: tell(text, "warning"),
        )
        if checkpoint is None or not bound_gib:
            journal.begin()
            return journal if bound_gib else None
        manifest = checkpoint.manifest
        message = journal.load(
            step=manifest.step,
            version=manifest.version,
            position=manifest.prompt_position,
            taken=manifest.taken,
        )
        if message is not None:
            tell(message, "info")
        return journal

    try:
        return await in_thread(opened)
    except OSError as error:
        folder = shlex.quote(str(spec.run.journal_dir))
        raise MachineError(
            f"the journal of samples in {spec.run.journal_dir} can neither be used nor removed",
            why=f"{type(error).__name__}: {error}",
            fix=[f"ls -l {folder}   # who owns it?", f"rm -r {folder}"],
        ) from error


def _oldest_kept(store: CheckpointStore) -> OldestCheckpoint | None:
    """Return the oldest checkpoint that may be resumed from, without those that are kept only
    because others need them; None while no checkpoint is complete."""
    complete = store.steps()
    needed = {one for step in complete for one in store.needs(step) if one != step}
    if not (steps := [step for step in complete if step not in needed]):
        return None
    record = read_json(store.path(steps[0]) / MANIFEST_NAME)
    return OldestCheckpoint(step=steps[0], position=record["prompt_position"])


def identity_of(spec: RunSpec) -> Identity:
    """Return the identity of this attempt."""
    recipe = spec.recipe.model_dump(mode="json")
    others = [name for name in run_records.MAY_CHANGE if name not in _OF_SAMPLES]
    changing = {name: recipe[name] for name in _OF_WEIGHTS}
    return Identity(
        past=_hash(
            {
                "records": FIELDS,
                "byteorder": sys.byteorder,
                "data": spec.inputs.data_sha256,
                "recipe": _without(recipe, (*others, "run.name")),
            }
        ),
        line=_hash(
            {
                "steps": spec.recipe.train.steps,
                "recipe": changing,
                "surroundings": run_records.run_conditions(spec.nodes.machine),
                "layout": run_records.layout_of(asdict(spec.plan)),
            }
        ),
        started=time.time(),
    )


def _without(recipe: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    """Return the recipe without these keys, `section` or `section.key`."""
    left = {name: value for name, value in recipe.items() if name not in names}
    for section, _, key in (name.partition(".") for name in names):
        if key and isinstance(values := left.get(section), Mapping):
            left[section] = {name: value for name, value in values.items() if name != key}
    return left


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
