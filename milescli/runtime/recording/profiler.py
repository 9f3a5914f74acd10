"""Takes profiles of a running run when `miles profile` requests one. It checks for requests between
two steps, which costs one file-system call. It changes nothing that is computed, and never ends a
run: errors go to the profile's state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from milescli.backends.ray.actor import ActorHandle
from milescli.checkpoint.run_dir import RunDir
from milescli.core.concurrency import in_thread
from milescli.core.errors import MilesError
from milescli.core.events import EventBus, Notice
from milescli.profiling import request as files
from milescli.profiling.request import Progress, Request, State
from milescli.runtime.recovery.engines import EngineActors
from milescli.train.base import Trainer

ENGINE_TIMEOUT_S = 40.0
"""Time for an engine's actor to begin or end a record: more than py-spy may take."""


@dataclass(slots=True, kw_only=True)
class _Active:
    request: Request
    state: State
    loop: object
    """Loop whose steps are counted: several adapters have a loop each."""
    began: float
    records: dict[int, ActorHandle] = field(default_factory=dict)
    """Actors that record, by engine."""


class Profiler:
    """Profiles one attempt on request. Belongs to one event loop."""

    def __init__(
        self,
        run: RunDir,
        *,
        trainer: Callable[[], Trainer | None],
        engines: Callable[[], Mapping[int, EngineActors]],
        bus: EventBus,
    ) -> None:
        """Refuse a request that an earlier attempt left, so that its caller stops waiting."""
        self._run, self._trainer, self._engines, self._bus = run, trainer, engines, bus
        self._active: _Active | None = None
        if files.is_pending(run) and (old := files.take_request(run)) is not None:
            ended = State(progress=Progress.ENDED, first_step=0, last_step=0)
            files.write_state(run, old.number, ended)

    async def between(self, step: int, *, loop: object = None) -> None:
        """Start a requested profile, or end one that is complete or cancelled. Call it between two
        steps, with the number of completed ones. `loop`: the caller."""
        active = self._active
        if active is None:
            if files.is_pending(self._run):
                await self._begin(step, loop)
        elif active.loop is loop:
            is_over = step >= active.state.first_step - 1 + active.request.steps
            if is_over or files.is_cancelled(self._run, active.request.number):
                await self._end(step)

    async def finish(self, step: int, *, loop: object = None) -> None:
        """End the current profile after the last step. `loop`: the loop whose last step it was;
        None: that of all loops."""
        if self._active is not None and loop in (None, self._active.loop):
            await self._end(step)

    def leave(self) -> None:
        """End the current profile because the attempt failed, so that its caller stops waiting."""
        if (active := self._active) is not None:
            self._active = None
            ended = replace(active.state, progress=Progress.ENDED)
            files.write_state(self._run, active.request.number, ended)

    async def _begin(self, step: int, loop: object) -> None:
        wanted = await in_thread(lambda: files.take_request(self._run))
        if wanted is None:
            return
        folder = files.folder_of(self._run, wanted.number)
        state = State(progress=Progress.BEGUN, first_step=step + 1, last_step=step)
        active = self._active = _Active(
            request=wanted, state=state, loop=loop, began=time.monotonic()
        )
        errors = await self._call("start_profile", wanted.ranks, str(folder), wanted.memory)
        missing = {str(rank): "the run has no such rank" for rank in wanted.ranks}
        failed = {number: error for number, error in (missing | errors).items() if error}
        active.state.ranks.update({number: {"error": error} for number, error in failed.items()})
        for number in wanted.engines:
            await self._begin_record(active, number, folder)
        files.write_state(self._run, wanted.number, active.state)
        self._notify(f"profile {wanted.number} of steps {step + 1} to {step + wanted.steps} starts")

    async def _begin_record(self, active: _Active, number: int, folder: Path) -> None:
        engine, error = self._engines().get(number), "the run has no such engine"
        if engine is not None:
            handle, file = engine.handles[0], folder / f"engine_{number}.stacks.txt"
            try:
                error = await handle.run("start_record", str(file), timeout_s=ENGINE_TIMEOUT_S)
                active.records[number] = handle
            except MilesError as failed:  # it died: who keeps it sees that, too
                error = failed.what
        if error:
            active.state.engines[str(number)] = {"error": error}

    async def _end(self, step: int) -> None:
        assert self._active is not None, "nothing is being profiled"
        active, self._active = self._active, None
        seconds, number = time.monotonic() - active.began, active.request.number
        engines, ranks = dict(active.state.engines), dict(active.state.ranks)
        for engine, handle in active.records.items():
            try:
                result = await handle.run("stop_record", timeout_s=ENGINE_TIMEOUT_S)
            except MilesError as failed:
                result = {"error": failed.what}
            engines.setdefault(str(engine), result)
        for rank, result in (await self._call("stop_profile", active.request.ranks)).items():
            ranks.setdefault(rank, result)
        done = State(
            progress=Progress.DONE,
            first_step=active.state.first_step,
            last_step=step,
            seconds=seconds,
            ranks=ranks,
            engines=engines,
        )
        files.write_state(self._run, number, done)
        self._notify(f"profile {number} is in {files.folder_of(self._run, number)}")

    async def _call(self, method: str, ranks: list[int], *args: Any) -> dict[str, Any]:
        """Call a method on these trainer ranks; return the results by rank."""
        trainer = self._trainer()
        if trainer is None or not ranks:
            return {}
        results = await trainer.call(method, ranks, *args)
        return {str(rank): result for rank, result in results.items()}

    def _notify(self, text: str) -> None:
        self._bus.emit(Notice(text=text))
