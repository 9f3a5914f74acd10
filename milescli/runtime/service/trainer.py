"""Implements the trainer of a service, whose ranks may die. New ranks have no adapter: one is
restored before the next call that needs it, from its last written state, and the calls since are
repeated. So unused adapters cost nothing, and a call that cannot be made only affects its own
adapter."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from milescli.core.concurrency import in_thread
from milescli.core.errors import (
    CheckpointError,
    MilesError,
    NotFiniteError,
    WaitTimeout,
    WorkerDied,
)
from milescli.core.events import Notice
from milescli.core.units import format_duration
from milescli.runtime.recovery.healing_trainer import Call, HealingTrainer
from milescli.runtime.recovery.rank_group import RankGroup
from milescli.runtime.recovery.restarts import Repairs

CHANGES = ("begin_adapter", "accumulate", "apply", "load_adapter")
"""Methods that change an adapter, so that they must be repeated."""
REPEATED_S = 20.0
"""Largest number of seconds of calls that new ranks repeat for an adapter; beyond it, the adapter
is written again."""
WRITE_SHARE = 0.1
"""If writing takes long: largest ratio of its time to the time that it saves."""


@dataclass(slots=True, kw_only=True)
class _Adapter:
    """Holds the state of one adapter, besides its recorded calls."""

    is_here: bool = False
    """True if the ranks hold it."""
    folder: Path | None = None
    """Folder in which it was last written; None if it was not."""
    work_s: float = 0.0
    """Seconds that the calls since then took."""
    write_s: float = 0.0
    """Seconds that writing took."""
    failure: str = ""
    """Why the last attempt to write it failed; empty if it did not."""


class ServiceTrainer(HealingTrainer):
    """Makes calls in the turns of adapters, which begin with `begin_adapter` and end with
    `drop_adapter`. A call either succeeds or changes nothing."""

    def __init__(
        self,
        ranks: RankGroup,
        *,
        restart: Callable[[], Awaitable[RankGroup]],
        repairs: Repairs,
        silence_s: float,
        folder: Path,
    ) -> None:
        """Set up the trainer. `restart` starts ranks without any adapter. `folder`: where adapters
        are written; it is emptied. The other arguments are those of HealingTrainer."""
        super().__init__(ranks, restart=restart, repairs=repairs, silence_s=silence_s)
        self.progress = 0
        """Calls that ended, and deaths between calls: a death at the same number as the one before
        has the same cause."""
        self._adapters = dict[str, _Adapter]()
        self._folder, self._numbers = folder, itertools.count()
        self._replaced = list[Path]()
        """Folders that newer ones replace."""
        self._began = 0.0
        """Start of the current call, without what it had to wait for."""
        shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        """Stop replacing ranks, and remove the written adapters."""
        await super().close()
        await in_thread(partial(shutil.rmtree, self._folder, ignore_errors=True))

    async def call(self, method: str, *args: Any, adapter: str | None = None, **kwargs: Any) -> Any:
        """Call the method on living ranks. Raises WorkerDied if ranks died of it as often as the
        limits of restarts allow, and CheckpointError if the adapter is lost."""
        if method == "begin_adapter":
            assert adapter is not None and adapter not in self._adapters, adapter
            self._adapters[adapter] = _Adapter()
        elif method == "drop_adapter":
            await self._forget(args[0])
        try:
            result = await super().call(method, *args, adapter=adapter, **kwargs)
        except Exception as error:
            await self._undo(method, adapter, error)
            if not isinstance(error, WorkerDied):
                raise
            what = f"a request was not done, and changed nothing: {error.what}"
            raise WorkerDied(what, why=error.why, fix=error.fixes) from error
        finally:
            self.progress += 1
        if adapter is not None and method in CHANGES:
            await self._bound(adapter, method)
        return result

    async def _undo(self, method: str, adapter: str | None, error: Exception) -> None:
        """Mark what a failed call may have changed, so that it is restored before the next one."""
        known = self._adapters.get(adapter or "")
        if adapter is not None and method == "begin_adapter":
            await self._forget(adapter)
        elif known is not None and method in CHANGES and not isinstance(error, NotFiniteError):
            known.is_here = False
        if not isinstance(error, CheckpointError | NotFiniteError) and len(self._ranks.ranks) > 1:
            await self._ranks.kill()  # where one failed, the others may wait for it

    async def _forget(self, adapter: str) -> None:
        known = self._adapters.pop(adapter, None)
        self._recorded.forget(adapter)
        if known is not None and known.folder is not None:
            await in_thread(partial(shutil.rmtree, known.folder, ignore_errors=True))

    @property
    def _is_whole(self) -> bool:
        """Return True: new ranks can always be started, and an adapter that is lost ends alone."""
        return True

    async def _cause(self, error: WorkerDied | WaitTimeout) -> WorkerDied:
        """Return the cause. Ranks that live but do not finish a call hang, whatever they report."""
        try:
            return await super()._cause(error)
        except WaitTimeout:
            return WorkerDied(f"trainer hangs: {error.what}", why=error.why, fix=error.fixes)

    async def _heal_idle(self, error: WorkerDied) -> None:
        await super()._heal_idle(error)
        self.progress += 1

    async def _start_again(self, error: WorkerDied) -> str:
        self._ranks, self._death = await self._restart(), None
        for adapter in self._adapters.values():
            adapter.is_here = False
        return f"and restores each of {len(self._adapters)} adapters when it is next used"

    async def _prepare(self, call: Call) -> None:
        await super()._prepare(call)
        if call.adapter is not None:
            known = self._adapters.get(call.adapter)
            if known is None:
                raise _lost(call.adapter, "it was unloaded")
            if not known.is_here:
                await self._restore(call.adapter, known)
        self._began = time.monotonic()

    async def _restore(self, adapter: str, known: _Adapter) -> None:
        """Restore the adapter to its state after the last successful call. Raises CheckpointError
        if that is not possible."""
        began, calls = time.monotonic(), self._recorded.since_checkpoint_of(adapter)
        if calls is None:
            raise _lost(adapter, f"ranks of the trainer died, and before that {known.failure}")
        await self._ranks.call("drop_adapter", adapter)
        await self._ranks.call("take_turn", adapter)
        if known.folder is not None:
            try:
                await self._ranks.call("restore_adapter", known.folder)
            except CheckpointError as error:
                raise _lost(adapter, error.why) from error
        for _, call in calls:
            await self._ranks.call(call.method, *call.args, **call.kwargs)
        known.is_here = True
        if calls or known.folder is not None:
            source = "from its beginning" if known.folder is None else "as it was last written"
            took, num = format_duration(time.monotonic() - began), len(calls)
            requests = f"{num} request{'s'[: num != 1]} repeated"
            text = f"adapter {adapter} is restored after {took}, {source}, {requests}"
            self._repairs.bus.emit(Notice(text=text, level="info"))

    def _record(self, call: Call) -> None:
        known = self._adapters.get(call.adapter or "")
        took = time.monotonic() - self._began
        if call.method == "keep_adapter":
            old, new = (known and known.folder), call.args[0]
            if known is not None:
                self._recorded.set_saved(self._recorded.done, call.adapter)
                known.folder, known.work_s, known.write_s, known.failure = new, 0.0, took, ""
            else:  # it was unloaded meanwhile
                old = new
            self._replaced += [old] if old is not None else []
        elif known is not None and call.method in CHANGES and call.kwargs.get("backward", True):
            self._recorded.add(call)
            known.work_s += took

    async def _bound(self, adapter: str, method: str) -> None:
        """Write the adapter if it is due, so that little must be repeated after a death. After a
        load, write it at once: a load is never repeated, as the client may change the loaded state.
        If the recorded requests of all adapters take too much memory, write the largest of them."""
        known = self._adapters[adapter]
        if method == "load_adapter":
            if not await self._keep(adapter):
                self._recorded.drop_adapter(adapter)
        elif known.work_s > max(REPEATED_S, known.write_s / WRITE_SHARE):
            await self._keep(adapter)
        while self._recorded.exceeds_limit and (largest := self._recorded.largest()):
            if not await self._keep(largest):
                self._recorded.drop_adapter(largest)

    async def _keep(self, adapter: str) -> bool:
        """Write the adapter; return False if that fails. The adapter is only lost if ranks die
        before it can be written. Raises nothing, because the request itself succeeded."""
        folder = self._folder / str(next(self._numbers))
        try:
            await super().call("keep_adapter", folder, adapter=adapter)
        except Exception as error:
            await self._undo("keep_adapter", adapter, error)
            await in_thread(partial(shutil.rmtree, folder, ignore_errors=True))
            self._note_not_written(adapter, error)
            return False
        while self._replaced:
            await in_thread(partial(shutil.rmtree, self._replaced.pop(), ignore_errors=True))
        return True

    def _note_not_written(self, adapter: str, error: Exception) -> None:
        if (known := self._adapters.get(adapter)) is None:
            return  # it was unloaded meanwhile
        why = error.why if isinstance(error, MilesError) else f"{type(error).__name__}: {error}"
        if not known.failure:
            text = (
                f"adapter {adapter} could not be written ({why}): until that is possible, it is "
                "lost where a rank of the trainer dies after a load, or after more requests than "
                "fault.kept_gib has room for"
            )
            self._repairs.bus.emit(Notice(text=text, level="warning"))
        known.failure, known.work_s = f"it could not be written: {why}", 0.0


def _lost(adapter: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the adapter {adapter} is lost",
        why=why,
        fix="load a saved state into a new adapter: create_training_client_from_state",
    )
