"""Of which run a journal of samples is: what decides what is sampled, and what decides the last
bits of the weights; and the journal of an attempt, by both."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

from milescli.checkpoint.base import MANIFEST_NAME
from milescli.checkpoint.store import CheckpointStore
from milescli.core.concurrency import in_thread
from milescli.core.errors import MachineError
from milescli.core.events import EventBus, Notice
from milescli.rollout.group_record import FIELDS
from milescli.runtime import drift
from milescli.runtime.sample_journal import Identity, Kept, SampleJournal
from milescli.runtime.spec import RunSpec

_OF_WEIGHTS = ("engines", "weights", "parallel")
"""Sections that may change at a resume, and change last bits."""


async def open_journal(
    spec: RunSpec, store: CheckpointStore, *, bus: EventBus
) -> SampleJournal | None:
    """The journal of an attempt; None where `fault.journal_gib` is 0. A resumed run is told what it
    finds in it. Raises MachineError where what lies there of another past cannot be removed."""
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
        said = journal.load(
            step=manifest.step,
            version=manifest.version,
            position=manifest.prompt_position,
            taken=manifest.taken,
        )
        if said is not None:
            tell(said, "info")
        return journal

    try:
        return await in_thread(opened)
    except OSError as error:
        raise MachineError(
            f"the journal of samples in {spec.run.journal_dir} can be neither used nor removed",
            why=f"{type(error).__name__}: {error}",
            fix=[f"ls -l {spec.run.journal_dir}   # whose is it?", f"rm -r {spec.run.journal_dir}"],
        ) from error


def _oldest_kept(store: CheckpointStore) -> Kept | None:
    """None while none is complete but those that stay for ever."""
    if not (steps := [step for step in store.steps() if step not in store.protect]):
        return None
    record = json.loads((store.path(steps[0]) / MANIFEST_NAME).read_text(encoding="utf-8"))
    return Kept(step=steps[0], position=record["prompt_position"])


def identity_of(spec: RunSpec) -> Identity:
    """Of this attempt."""
    recipe = spec.recipe.model_dump(mode="json")
    changing = {name: recipe[name] for name in _OF_WEIGHTS}
    return Identity(
        past=_hash(
            {
                "records": FIELDS,
                "byteorder": sys.byteorder,
                "data": spec.inputs.data_sha256,
                "recipe": _without(recipe, drift.MAY_CHANGE),
            }
        ),
        line=_hash(
            {
                "steps": spec.recipe.train.steps,
                "recipe": changing,
                "surroundings": drift.surroundings(spec.nodes.machine),
                "layout": drift.layout_of(asdict(spec.plan)),
            }
        ),
    )


def _without(recipe: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    """Without these keys, `section` or `section.key`."""
    left = {name: value for name, value in recipe.items() if name not in names}
    for section, _, key in (name.partition(".") for name in names):
        if key and isinstance(values := left.get(section), Mapping):
            left[section] = {name: value for name, value in values.items() if name != key}
    return left


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
