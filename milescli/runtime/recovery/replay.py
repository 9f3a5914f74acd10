"""Calls of a trainer that new ranks can repeat: `RecordedCalls` holds those that changed the ranks.
`healing_trainer` records them, and repeats them on the ranks that it starts in the place of dead
ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from milescli.train.base import TrainBatch, Trainer


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the trainer's ranks."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    """Whose turn it must be; None: the ranks train one policy."""

    @property
    def fleet(self) -> str | None:
        """Name of the fleet whose channel must be open."""
        return self.args[-1] if self.method in ("publish", "verify") else None

    @property
    def size_bytes(self) -> int:
        """Size of its batch, where it has one."""
        batches = [value for value in self.args if isinstance(value, TrainBatch)]
        return sum(shard.size_bytes for batch in batches for shard in batch.shards)

    async def of(self, ranks: Trainer) -> Any:
        """Make the call, in the turn of its adapter."""
        if self.adapter is not None:
            await ranks.call("take_turn", self.adapter)
        return await ranks.call(self.method, *self.args, **self.kwargs)


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
