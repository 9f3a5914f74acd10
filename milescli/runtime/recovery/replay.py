"""Calls of a trainer that new ranks can repeat: `ReplayedTrainer` turns each method of a Trainer
into a `Call`, and `RecordedCalls` records those that changed the ranks. `healing_trainer` makes the
calls, and repeats them on the ranks that it starts in the place of dead ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from milescli.core.errors import CheckpointError
from milescli.core.types import ROLLOUT, EngineAddress, StepReport, WeightVersion
from milescli.train.base import Stepped, TrainBatch


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the trainer's ranks."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    fleet: str | None = None
    """Whose channel must be open."""
    adapter: str | None = None
    """Whose turn it must be; None: the ranks train one policy."""

    @property
    def size_bytes(self) -> int:
        """Size of its batch, where it has one."""
        batches = [value for value in self.args if isinstance(value, TrainBatch)]
        return sum(shard.size_bytes for batch in batches for shard in batch.shards)

    async def of(self, ranks: Any) -> Any:
        """Make the call. `ranks`: a RankGroup."""
        if self.adapter is not None:
            await ranks.take_turn(self.adapter)
        return await getattr(ranks, self.method)(*self.args, **self.kwargs)


Numbered = list[tuple[int, Call]]
"""(calls that were done before it, it)"""


@dataclass(slots=True, kw_only=True)
class RecordedCalls:
    """The last calls that changed the ranks. A *mark* is a number of such calls since the run
    began: new ranks that are as the old ones were at a mark do again what follows. Adapters change
    apart from each other, and each has a checkpoint of its own."""

    limit_bytes: float
    done: int = 0
    """Mark of the ranks as they are."""
    size_bytes: int = 0
    """Of the batches that are kept."""
    _saved: dict[str | None, int] = field(default_factory=dict)
    """By adapter: mark of its newest checkpoint that is complete."""
    _lost: dict[str | None, int] = field(default_factory=dict)
    """By adapter: the mark from which on all of its calls are kept."""
    _calls: Numbered = field(default_factory=list)

    def add(self, call: Call) -> None:
        """Record a call that was made."""
        self._calls.append((self.done, call))
        self.done += 1
        self.size_bytes += call.size_bytes

    @property
    def is_too_much(self) -> bool:
        """Some must be let go."""
        return self.size_bytes > self.limit_bytes

    def saved(self, adapter: str | None = None) -> int:
        """Mark of the newest checkpoint that is complete, or of the beginning."""
        return self._saved.get(adapter, 0)

    @property
    def has_saved(self) -> bool:
        """True if any checkpoint was completed since the beginning."""
        return any(self._saved.values())

    def set_saved(self, mark: int, adapter: str | None = None) -> None:
        """Record that the checkpoint of that mark is complete: earlier calls will not be
        repeated."""
        self._saved[adapter] = mark
        self._drop(lambda number, call: number < mark and call.adapter == adapter)

    def reaches(self, mark: int | None) -> bool:
        """True if all calls since `mark` are recorded."""
        return mark is not None and all(lost <= mark for lost in self._lost.values())

    @property
    def reaches_checkpoints(self) -> bool:
        """True if all calls are recorded since the checkpoint, of each adapter since its own."""
        return all(lost <= self.saved(adapter) for adapter, lost in self._lost.items())

    def since(self, mark: int) -> Numbered:
        """Return the calls that ranks must repeat which are as these were at `mark`."""
        assert self.reaches(mark), f"calls since {mark} are asked for, kept since {self._lost}"
        return [(number, call) for number, call in self._calls if number >= mark]

    @property
    def since_checkpoints(self) -> Numbered:
        """Return the calls that ranks must repeat which are as the checkpoints."""
        assert self.reaches_checkpoints, f"kept since {self._lost}, saved at {self._saved}"
        return [each for each in self._calls if each[0] >= self.saved(each[1].adapter)]

    def let_go(self, mark: int) -> None:
        """Forget the calls before `mark`, which no longer need to be repeated, or no longer can
        be."""
        self._drop(lambda number, call: number < mark)

    def _drop(self, is_gone: Callable[[int, Call], bool]) -> None:
        kept: Numbered = []
        for number, call in self._calls:
            if is_gone(number, call):
                self._lost[call.adapter] = number + 1
            else:
                kept.append((number, call))
        self._calls = kept
        self.size_bytes = sum(call.size_bytes for _, call in kept)


def num_steps(calls: Iterable[tuple[int, Call]]) -> int:
    """Optimizer steps among them."""
    return sum(call.method == "step" for _, call in calls)


class ReplayedTrainer:
    """Turns each method of milescli.train.base.Trainer, which it implements, into a `Call`. The
    subclass makes the calls."""

    adapter: str | None = None
    """Whose calls they are; None: the ranks train one policy."""

    async def ask(self, call: Call, *, changes: bool = False) -> Any:
        """Make a call on ranks that live. `changes`: the ranks are others afterwards."""
        raise NotImplementedError

    def note(self, call: Call) -> None:
        """Record a call that was made, so that new ranks can be brought to where it left the old
        ones: their memory state, open channels, a save under way."""
        raise NotImplementedError

    async def is_written_of(self, adapter: str | None) -> bool:
        """Same as `is_written`, for one adapter."""
        raise NotImplementedError

    def failed_save(self, adapter: str | None) -> CheckpointError | None:
        """Return why new ranks could not write what the dead ones had begun to."""
        raise NotImplementedError

    def _call(self, method: str, *args: Any, fleet: str | None = None, **kwargs: Any) -> Call:
        return Call(method, args, kwargs, fleet=fleet, adapter=self.adapter)

    async def _noted(self, method: str, *args: Any) -> None:
        call = self._call(method, *args)
        await self.ask(call)
        self.note(call)

    async def _changed(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self.ask(self._call(method, *args, **kwargs), changes=True)

    async def connect_engines(self, engines: list[EngineAddress], fleet: str = ROLLOUT) -> None:
        await self._noted("connect_engines", engines, fleet)

    async def step(
        self, batch: TrainBatch, *, lr: float | None, critic_lr: float | None = None
    ) -> Stepped:
        return await self._changed("step", batch, lr=lr, critic_lr=critic_lr)

    async def start_critic(self) -> None:
        await self._changed("start_critic")

    async def measure(self, batch: TrainBatch) -> StepReport:
        return await self.ask(self._call("measure", batch))

    async def score(
        self, batch: TrainBatch, *, rounded_otherwise: bool = False
    ) -> list[np.ndarray]:
        return await self.ask(self._call("score", batch, rounded_otherwise=rounded_otherwise))

    async def ask_teachers(self, batch: TrainBatch) -> list[tuple[np.ndarray, np.ndarray]]:
        return await self.ask(self._call("ask_teachers", batch))

    async def dismiss_teachers(self) -> None:
        await self._noted("dismiss_teachers")

    async def publish(self, version: WeightVersion, fleet: str = ROLLOUT) -> None:
        await self.ask(self._call("publish", version, fleet, fleet=fleet))

    async def verify(self, fleet: str = ROLLOUT) -> None:
        await self.ask(self._call("verify", fleet, fleet=fleet))

    async def reset_optimizer(self) -> None:
        await self._changed("reset_optimizer")

    async def freeze_reference(self) -> None:
        await self._changed("freeze_reference")

    async def silence_layers(self, first: int) -> None:
        await self.ask(self._call("silence_layers", first))

    async def shed(self) -> None:
        await self._noted("shed")

    async def sleep(self) -> None:
        await self._noted("sleep")

    async def wake(self) -> None:
        await self._noted("wake")

    async def save(self, folder: Path) -> None:
        await self._noted("save", folder)

    async def is_written(self) -> bool:
        return await self.is_written_of(self.adapter)

    async def finish_save(self) -> dict[str, str]:
        sha256 = await self.ask(self._call("finish_save"))
        if (failed := self.failed_save(self.adapter)) is not None:
            raise failed
        return sha256

    async def load(self, folder: Path, *, weights_only: bool = False) -> None:
        await self._changed("load", folder, weights_only=weights_only)
