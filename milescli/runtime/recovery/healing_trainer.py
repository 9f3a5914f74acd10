"""The trainer of a run whose ranks may die: `HealingTrainer` starts new ones on the same slots,
loads the newest copy of the state or checkpoint, and repeats the later calls, which `RecordedCalls`
holds with their batches. The engines keep running, and nothing is sampled twice."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milescli.checkpoint.store import save_failed
from milescli.core.errors import CheckpointError, NodeDied, WaitTimeout, WorkerDied
from milescli.core.events import Notice
from milescli.core.types import EngineAddress
from milescli.core.units import format_bytes
from milescli.runtime.recovery.peer_copies import Copies
from milescli.runtime.recovery.rank_group import DEATH_GRACE_S, RankGroup, RankWatch
from milescli.runtime.recovery.restarts import Repairs, with_refusal
from milescli.train.base import TrainBatch, Trainer

CHANGES = ("step", "start_critic", "reset_optimizer", "freeze_reference", "load")
"""Methods that change the ranks' state, so that new ranks must repeat them."""
WRITES = ("save", "save_adapter", "keep_adapter")
"""Methods whose first argument is the folder that they write; dead ranks may have left a part of
it."""


@dataclass(frozen=True, slots=True)
class Call:
    """Describes one call of the trainer's ranks."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    """Adapter whose turn it must be; None: the ranks train one policy."""

    @property
    def fleet(self) -> str | None:
        """Return the name of the fleet whose channel must be open for the call."""
        return self.args[-1] if self.method in ("publish", "verify") else None

    @property
    def size_bytes(self) -> int:
        """Return the size of its batches; 0 if it has none."""
        batches = [value for value in self.args if isinstance(value, TrainBatch)]
        return sum(shard.size_bytes for batch in batches for shard in batch.shards)

    async def repeat(self, ranks: Trainer) -> None:
        """Make the call on new ranks, in the turn of its adapter."""
        if self.adapter is not None:
            await ranks.call("take_turn", self.adapter)
        await ranks.call(self.method, *self.args, **self.kwargs)


NumberedCalls = list[tuple[int, Call]]
"""[(number of earlier calls, the call)]"""


@dataclass(slots=True, kw_only=True)
class RecordedCalls:
    """Holds the last calls that changed the ranks. A *mark* is the number of such calls since the
    run began: new ranks with the state of a mark repeat the calls after it. Adapters change
    independently of each other, and each has its own checkpoint."""

    limit_bytes: float
    done: int = 0
    """Mark of the ranks' current state."""
    size_bytes: int = 0
    """Bytes of the batches in the recorded calls."""
    _saved_marks: dict[str | None, int] = field(default_factory=dict)
    """Adapter -> mark of its newest complete checkpoint."""
    _recorded_since: dict[str | None, int] = field(default_factory=dict)
    """Adapter -> mark from which all of its calls are recorded."""
    _calls: NumberedCalls = field(default_factory=list)

    def add(self, call: Call) -> None:
        """Record a call that has returned."""
        self._calls.append((self.done, call))
        self.done += 1
        self.size_bytes += call.size_bytes

    @property
    def exceeds_limit(self) -> bool:
        """Return True if the batches exceed the limit, so that some must be dropped."""
        return self.size_bytes > self.limit_bytes

    def saved(self, adapter: str | None = None) -> int:
        """Return the mark of the newest complete checkpoint, or 0 for the beginning."""
        return self._saved_marks.get(adapter, 0)

    @property
    def has_saved(self) -> bool:
        """Return True if any checkpoint was completed since the beginning."""
        return any(self._saved_marks.values())

    def set_saved(self, mark: int, adapter: str | None = None) -> None:
        """Record that the checkpoint of that mark is complete: earlier calls will not be
        repeated."""
        self._saved_marks[adapter] = mark
        self._drop(lambda number, call: number < mark and call.adapter == adapter)

    def has_since(self, mark: int | None) -> bool:
        """Return True if all calls since `mark` are recorded."""
        return mark is not None and all(lost <= mark for lost in self._recorded_since.values())

    @property
    def has_since_checkpoints(self) -> bool:
        """Return True if all calls since the checkpoint, of each adapter its own, are recorded."""
        return all(lost <= self.saved(adapter) for adapter, lost in self._recorded_since.items())

    def since(self, mark: int) -> NumberedCalls:
        """Return the calls that ranks with the state of `mark` must repeat."""
        assert self.has_since(mark), (
            f"calls since {mark} are needed, recorded since {self._recorded_since}"
        )
        return [(number, call) for number, call in self._calls if number >= mark]

    @property
    def since_checkpoints(self) -> NumberedCalls:
        """Return the calls that ranks with the checkpoints' state must repeat."""
        assert self.has_since_checkpoints, (
            f"recorded since {self._recorded_since}, saved at {self._saved_marks}"
        )
        return [each for each in self._calls if each[0] >= self.saved(each[1].adapter)]

    def since_checkpoint_of(self, adapter: str) -> NumberedCalls | None:
        """Return the calls of one adapter that ranks with its checkpoint must repeat; None if some
        were dropped."""
        if self._recorded_since.get(adapter, 0) > self.saved(adapter):
            return None
        return [each for each in self._calls if each[1].adapter == adapter]

    def largest(self) -> str | None:
        """Return the adapter whose recorded batches take the most memory; None if there are
        none."""
        sizes = Counter[str]()
        for _, call in self._calls:
            sizes[call.adapter or ""] += call.size_bytes
        return max(sizes, key=lambda name: sizes[name], default=None)

    def drop_adapter(self, adapter: str) -> None:
        """Drop the calls of one adapter; they cannot be repeated afterwards."""
        self._drop(lambda _, call: call.adapter == adapter)

    def forget(self, adapter: str) -> None:
        """Forget an adapter."""
        self.drop_adapter(adapter)
        self._saved_marks.pop(adapter, None)
        self._recorded_since.pop(adapter, None)

    def drop_before(self, mark: int) -> None:
        """Drop the calls before `mark`, because they need not, or can not, be repeated any more."""
        self._drop(lambda number, call: number < mark)

    def _drop(self, is_gone: Callable[[int, Call], bool]) -> None:
        left: NumberedCalls = []
        for number, call in self._calls:
            if is_gone(number, call):
                self._recorded_since[call.adapter] = number + 1
            else:
                left.append((number, call))
        self._calls = left
        self.size_bytes = sum(call.size_bytes for _, call in left)


def num_steps(calls: Iterable[tuple[int, Call]]) -> int:
    """Return the number of optimizer steps among the calls."""
    return sum(call.method == "step" for _, call in calls)


class HealingTrainer(Trainer):
    """Makes the calls of a trainer on living ranks: if ranks die, it starts new ones and repeats
    the calls of the old ones. One call at a time; belongs to one event loop."""

    def __init__(
        self,
        ranks: RankGroup,
        *,
        restart: Callable[[], Awaitable[RankGroup]],
        repairs: Repairs,
        silence_s: float,
        name: str = "trainer",
        free_devices: Callable[[], AbstractAsyncContextManager[None]] | None = None,
        copies: Copies | None = None,
    ) -> None:
        """Set up the trainer. `restart` starts ranks with the weights of the newest checkpoint, or
        the initial ones if there is none. `silence_s`: the recipe's `machine.silence_s`. `name`: of
        all ranks together, in errors and events. `free_devices`: a context in which new ranks may
        use devices that they share in turns; None: they have their own devices, and start as soon
        as a death is noticed. `copies`: takes copies of their state after steps."""
        self._ranks = ranks
        self._watch = RankWatch(name, silence_s, bus=repairs.bus, step=repairs.step)
        self._name = name
        self._restart, self._repairs = restart, repairs
        self._turn = asyncio.Lock()
        self._recorded = RecordedCalls(limit_bytes=repairs.restarts.limits.kept_gib * 1024**3)
        self._copies = copies
        self._is_warned = False
        """The user knows that a death would end the run, as calls were dropped."""
        self._saving: dict[str | None, tuple[Path, int]] = {}
        """By adapter: the folder that is being written, and the mark of its content. No copy is
        taken meanwhile: new ranks that write it anew must begin before it."""
        self._failed_saves: dict[str | None, CheckpointError] = {}
        """Why new ranks could not write that folder."""
        self._lasting = list[Call]()
        """Calls whose effect no checkpoint holds: new ranks repeat them first."""
        self._free_devices, self._memory_state = free_devices, Call("wake")
        """The last of `offload_optimizer_state`, `sleep` and `wake`: new ranks begin awake."""
        self._fleets: dict[str, list[EngineAddress]] = {}
        self._open = set[str]()
        """Fleets that these ranks have a channel to."""
        self._healing: asyncio.Task[None] | None = None
        self._death: WorkerDied | None = None
        """The death that was seen first, until new ranks are started."""

    def of_adapter(self, name: str) -> AdapterTrainer:
        """Return a trainer for one of several adapters, which makes every call in its turn."""
        return AdapterTrainer(self, name)

    def note_saved(self, adapter: str | None = None) -> None:
        """Record that the newest checkpoint is complete, or that the ranks hold a complete one:
        earlier calls need never be repeated."""
        _, mark = self._saving.pop(adapter, (None, self._recorded.done))
        self._recorded.set_saved(mark, adapter)

    def note_save_failed(self, adapter: str | None = None) -> None:
        """Record that the last checkpoint will never be complete: calls since the one before stay
        recorded."""
        self._saving.pop(adapter, None)
        self._failed_saves.pop(adapter, None)

    @property
    def _is_whole(self) -> bool:
        """Return True if all calls that new ranks would have to repeat are recorded."""
        copy = self._copies.mark if self._copies is not None else None
        return self._recorded.has_since_checkpoints or self._recorded.has_since(copy)

    async def probe(self) -> None:
        """Check the ranks, and start to replace those that are dead or hang. Raises WorkerDied if
        that is impossible, because calls were dropped or a limit is reached."""
        if self._healing is not None and self._healing.done():
            healed, self._healing = self._healing, None
            healed.result()
        if self._copies is not None:
            await self._copies.probe()
            self._warn(
                "the copy is lost, and earlier batches were dropped because of fault.kept_gib"
            )
        is_idle = self._healing is None and not self._turn.locked() and self._free_devices is None
        if self._death is not None and not is_idle:
            return  # they are being replaced, or will be when it is their turn
        ranks = self._ranks
        error = await self._watch.loss(ranks)
        if error is None or ranks is not self._ranks:
            return
        if not self._is_whole or isinstance(error, NodeDied):
            raise error
        self._death = error
        await ranks.kill()  # whoever waits for them learns it at once, and heals
        if self._healing is None and not self._turn.locked() and self._free_devices is None:
            self._healing = asyncio.ensure_future(self._heal_idle(error))

    async def close(self) -> None:
        """Stop replacing ranks."""
        if self._healing is not None:
            self._healing.cancel()
            await asyncio.gather(self._healing, return_exceptions=True)
        if self._copies is not None:
            await self._copies.close()

    async def _heal_idle(self, error: WorkerDied) -> None:
        """Replace dead ranks while no call is running that would notice them."""
        dead = self._ranks
        async with self._turn:
            if self._ranks is dead:
                await self._recover(error)

    async def call(self, method: str, *args: Any, adapter: str | None = None, **kwargs: Any) -> Any:
        """Call the method on living ranks. `adapter`: whose call it is, if several take turns."""
        call = Call(method, args, kwargs, adapter=adapter)
        async with self._turn:
            while True:
                try:
                    await self._prepare(call)
                    with self._watch.timed(method, call.size_bytes):
                        if adapter is not None:
                            await self._ranks.call("take_turn", adapter)
                        result = await self._ranks.call(method, *args, **kwargs)
                    break
                except (WorkerDied, WaitTimeout) as error:
                    if method == "is_written":  # `probe` sees it, too
                        return False
                    await self._recover(await self._cause(error))
            self._record(call)
            if method == "step" and self._copies is not None:
                await self._copy(self._copies)
        if method == "finish_save" and (failed := self._failed_saves.get(adapter)) is not None:
            raise failed
        return result

    async def _copy(self, copies: Copies) -> None:
        """Start a copy of the current state if one is due. If ranks die meanwhile, the next call
        notices."""
        copies.count_step()
        if not self._saving:
            with suppress(WorkerDied, WaitTimeout):
                await copies.take(self._ranks, self._recorded.done)

    async def _prepare(self, call: Call) -> None:
        """Open the channel that a call needs, or empty the folder that it writes."""
        if call.fleet is not None and call.fleet not in self._open:
            await self._ranks.connect_engines(self._fleets[call.fleet], call.fleet)
            self._open.add(call.fleet)
        if call.method in WRITES:
            _empty_folder(call.args[0])

    async def _cause(self, error: WorkerDied | WaitTimeout) -> WorkerDied:
        """Return the death of a rank that explains the error, which is raised if none has died."""
        dead = self._death or await self._ranks.find_dead(within_s=DEATH_GRACE_S)
        if isinstance(dead, NodeDied):
            raise dead
        if dead is None or not self._is_whole:
            raise error
        return dead

    def _record(self, call: Call) -> None:
        """Record a call that has returned, so that new ranks can be brought to the same state."""
        match call.method:
            case "connect_engines":
                engines, fleet = call.args
                self._fleets[fleet] = engines
                self._open.add(fleet)
            case "free_teachers":
                self._lasting.append(call)
            case "offload_optimizer_state" | "sleep" | "wake":
                self._memory_state = call
            case "save":
                self._saving[call.adapter] = call.args[0], self._recorded.done
            case method if method in CHANGES:
                self._add(call)

    def _add(self, call: Call) -> None:
        """Record a call that changed the ranks. If the batches are too large, drop first those that
        no copy needs, then all: until the next checkpoint or copy, a rank's death ends the run."""
        recorded, copies = self._recorded, self._copies
        recorded.add(call)
        if recorded.exceeds_limit and copies is not None and recorded.has_since(copies.mark):
            recorded.drop_before(copies.mark)
        size = format_bytes(recorded.size_bytes)
        if recorded.exceeds_limit:
            recorded.drop_before(recorded.done)
        self._warn(f"the batches since the last one need {size}, more than fault.kept_gib")

    def _warn(self, why: str) -> None:
        """Warn once that a rank's death would end the run, until all calls are recorded again."""
        if not self._is_whole and not self._is_warned:
            until = "checkpoint" if self._copies is None else "checkpoint or copy"
            text = f"until the next {until}, the death of a trainer rank ends the run: {why}"
            self._repairs.bus.emit(Notice(text=text, level="warning"))
        self._is_warned = not self._is_whole

    async def _recover(self, error: WorkerDied) -> None:
        """Start new ranks, and bring them to the state of the dead ones. Raises the error if a
        limit is reached, or calls that they would have to repeat were dropped."""
        began = time.monotonic()
        while True:
            if not self._is_whole:
                raise error
            if refusal := self._repairs.begin(self._name, error):
                raise with_refusal(error, refusal)
            try:
                await self._ranks.kill()
                async with (
                    self._free_devices() if self._free_devices is not None else nullcontext()
                ):
                    source = await self._start_again(error)
                    if self._memory_state.method != "wake":  # as new ranks are
                        await self._memory_state.repeat(self._ranks)
            except (WorkerDied, WaitTimeout) as another:
                if (dead := await self._ranks.find_dead(within_s=DEATH_GRACE_S)) is None:
                    raise
                error = dead if isinstance(another, WaitTimeout) else another
                continue
            break
        self._repairs.done(self._name, began=began, source=source)

    async def _start_again(self, error: WorkerDied) -> str:
        """Start ranks, and repeat the calls since the copy or the checkpoint, whichever is newer.
        Return for people what was repeated; empty if no step was. Raises the error if the copy is
        lost and the checkpoint is too old."""
        recorded, copies = self._recorded, self._copies
        mark = copies.mark if copies is not None else None
        if copies is not None and mark is not None and mark >= recorded.saved():
            calls = recorded.since(mark)
            self._ranks, self._death = await copies.start_ranks(), None
            self._open.clear()
            if await copies.restore(self._ranks):
                await self._repeat(calls)
                return f"from the copy in memory, {_describe_repeated(calls)}"
            await self._ranks.kill()
        if not recorded.has_since_checkpoints:
            raise error
        self._ranks, self._death = await self._restart(), None
        self._open.clear()
        calls = recorded.since_checkpoints
        await self._repeat(calls)
        if not num_steps(calls):
            return ""
        begun = "the newest checkpoint" if recorded.has_saved else "the beginning"
        return f"from {begun}, {_describe_repeated(calls)}"

    async def _repeat(self, calls: NumberedCalls) -> None:
        """Repeat the calls, and write an unfinished checkpoint again at the same point."""
        for call in self._lasting:
            await call.repeat(self._ranks)
        due = dict(self._saving)
        for number, call in calls:
            if call.adapter in due and number >= due[call.adapter][1]:
                await self._save_again(due.pop(call.adapter)[0], call.adapter)
            await call.repeat(self._ranks)
        for adapter, (folder, _) in due.items():
            await self._save_again(folder, adapter)

    async def _save_again(self, folder: Path, adapter: str | None) -> None:
        try:
            _empty_folder(folder)
            await Call("save", (folder,), adapter=adapter).repeat(self._ranks)
            await Call("finish_save", adapter=adapter).repeat(self._ranks)
        except CheckpointError as error:
            self._failed_saves[adapter] = error


class AdapterTrainer(Trainer):
    """Makes the calls of one of several adapters, each in that adapter's turn."""

    def __init__(self, trainer: HealingTrainer, name: str) -> None:
        self._trainer, self.adapter = trainer, name

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self._trainer.call(method, *args, adapter=self.adapter, **kwargs)

    def note_saved(self) -> None:
        """Record that its newest checkpoint is complete."""
        self._trainer.note_saved(self.adapter)

    def note_save_failed(self) -> None:
        """Record that its last checkpoint will never be complete."""
        self._trainer.note_save_failed(self.adapter)


def _describe_repeated(calls: NumberedCalls) -> str:
    num = num_steps(calls)
    return f"{num} step{'s'[: num != 1]} repeated"


def _empty_folder(folder: Path) -> None:
    """Remove what dead ranks have left of a checkpoint. Raises CheckpointError if the disk is
    full."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise save_failed(folder, error) from error
