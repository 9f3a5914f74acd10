"""What trainer ranks were asked that changed them, as far as new ranks may have to do it again.
Filled and read by `healing_trainer`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from milescli.train.base import TrainBatch


@dataclass(frozen=True, slots=True)
class Call:
    """Something that the ranks were asked."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    fleet: str | None = None
    """Whose channel must be open."""

    @property
    def size_bytes(self) -> int:
        """Of its batch, where it has one."""
        batches = [value for value in self.args if isinstance(value, TrainBatch)]
        return sum(shard.size_bytes for batch in batches for shard in batch.shards)

    async def of(self, ranks: Any) -> Any:
        """Ask it. `ranks`: a RankGroup."""
        return await getattr(ranks, self.method)(*self.args, **self.kwargs)


@dataclass(slots=True, kw_only=True)
class KeptCalls:
    """The last calls that changed the ranks, without a gap. A *mark* is a number of such calls
    since the run began: new ranks that are as the old ones were at a mark do again what follows."""

    limit_bytes: float
    done: int = 0
    """Mark of the ranks as they are."""
    checkpoint: int = 0
    """Mark of the newest checkpoint that is complete, or of the beginning."""
    size_bytes: int = 0
    """Of the batches that are kept."""
    _calls: list[Call] = field(default_factory=list)

    def add(self, call: Call) -> None:
        """It was done."""
        self._calls.append(call)
        self.done += 1
        self.size_bytes += call.size_bytes

    @property
    def is_too_much(self) -> bool:
        """Some must be let go."""
        return self.size_bytes > self.limit_bytes

    def reaches(self, mark: int | None) -> bool:
        """Whether all that was done since is there."""
        return mark is not None and self._first <= mark

    def since(self, mark: int) -> list[Call]:
        """What must be done again by ranks that are as these were then."""
        assert self.reaches(mark), f"calls since {mark} are asked for, kept since {self._first}"
        return self._calls[mark - self._first :]

    def let_go(self, mark: int) -> None:
        """What was done before will not be asked for."""
        del self._calls[: max(0, mark - self._first)]
        self.size_bytes = sum(call.size_bytes for call in self._calls)

    @property
    def _first(self) -> int:
        """The mark from which on they are kept."""
        return self.done - len(self._calls)


def num_steps(calls: Iterable[Call]) -> int:
    """Optimizer steps among them."""
    return sum(call.method == "step" for call in calls)
