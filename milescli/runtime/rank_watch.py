"""Whether the ranks of a trainer live, speak, and get on with what they do. Asked each second by
`healing_trainer`, which acts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from milescli.core.concurrency import in_thread
from milescli.core.errors import WorkerDied
from milescli.core.events import EventBus
from milescli.core.files import last_log_lines
from milescli.core.silence import UNSURE, Silence
from milescli.core.units import format_duration
from milescli.runtime.trainer import RankGroup

WATCHED = ("step", "score", "measure", "ask_teachers", "publish", "verify")
"""What takes about as long each time for a batch of about that size. A save waits for disks, and
has its own bound."""
LONGER = 5.0
"""Times the longest so far: what the same call may take."""


class RankWatch:
    """Of one trainer, over all its generations of ranks. Belongs to one event loop."""

    def __init__(
        self, name: str, silence_s: float, *, bus: EventBus, step: Callable[[], int]
    ) -> None:
        """`name`: of all ranks together; `step`: steps done."""
        self._name, self._bound_s, self._bus, self._step = name, silence_s, bus, step
        self._ranks: RankGroup | None = None
        self._silences = list[Silence]()
        """[ranks]"""
        self._longest = dict[tuple[str, int], float]()
        """(method, bits in the size of its batch) -> seconds."""
        self._doing: tuple[str, Silence] | None = None

    @contextmanager
    def during(self, method: str, size_bytes: int) -> Iterator[None]:
        """The ranks do this, with a batch of this size, or with none."""
        key, began = (method, size_bytes.bit_length()), time.monotonic()
        if method in WATCHED and (longest_s := self._longest_of(*key)):
            silence = Silence(
                worker=self._name, bound_s=self._bound_s, longest_s=LONGER * longest_s
            )
            self._doing = method, silence
        try:
            yield
            self._longest[key] = max(self._longest.get(key, 0.0), time.monotonic() - began)
        finally:
            self._doing = None

    def _longest_of(self, method: str, bits: int) -> float:
        """Seconds that it took with a batch of half the size at least; 0.0: never done."""
        seconds = self._longest.items()
        return max(
            (s for (what, size), s in seconds if what == method and size >= bits - 1), default=0.0
        )

    async def loss(self, ranks: RankGroup) -> WorkerDied | None:
        """Why other ranks are needed; None: these are well, so far."""
        if ranks is not self._ranks:
            names = [rank.name for rank in ranks.ranks]
            self._silences = [Silence(worker=name, bound_s=self._bound_s) for name in names]
            self._ranks = ranks
        try:
            hangs = await ranks.look()
        except WorkerDied as error:
            return error
        for silence, hang in zip(self._silences, hangs, strict=True):
            is_sure = hang is None or hang.is_sure
            silence.look(hang.why if hang else None, times=1.0 if is_sure else UNSURE)
            self._tell(silence)
        for number, silence in enumerate(self._silences):
            if silence.is_too_long:
                return await self._hung(ranks, silence, number)
        return await self._overdue(ranks)

    async def _overdue(self, ranks: RankGroup) -> WorkerDied | None:
        """Where all ranks speak, and what they do takes much longer than ever before."""
        if self._doing is None:
            return None
        method, silence = self._doing
        usual = format_duration(silence.longest_s / LONGER)
        # where an engine hangs in a publish, it is the first to be ended
        silence.look(f"it is in `{method}`, which took {usual} at most before", times=UNSURE)
        self._tell(silence)
        return await self._hung(ranks, silence, 0) if silence.is_too_long else None

    def _tell(self, silence: Silence) -> None:
        if news := silence.news(self._step()):
            self._bus.emit(news)

    async def _hung(self, ranks: RankGroup, silence: Silence, number: int) -> WorkerDied:
        """The error of rank `number`, or of all. Writes down where they are, first."""
        doing = f", in `{self._doing[0]}`" if self._doing is not None else ""
        stacks = await in_thread(ranks.dump_stacks)
        log = ranks.ranks[number].log_path
        return WorkerDied(
            f"{silence.worker} has not spoken for {silence.seconds:.0f} s{doing}",
            why=f"{silence.reason}{f'; stacks of all ranks: {stacks}' if stacks else ''}\n"
            f"last lines of its log:\n{last_log_lines(log)}",
            fix=[f"less {log}", f"--set machine.silence_s={4 * self._bound_s:.0f}"],
        )
