"""Presents all trainer ranks as one Trainer: `RankGroup` makes the same call on every rank, with
time limits and names. It lives in the driver; the ranks are actors. `RankWatch` checks each second
whether they live, answer and make progress; `healing_trainer` replaces them."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from milescli.backends.ray.actor import ActorHandle, gather_all
from milescli.backends.ray.cluster import Cluster
from milescli.core.concurrency import in_thread
from milescli.core.errors import WorkerDied
from milescli.core.events import EventBus
from milescli.core.files import last_log_lines
from milescli.core.run_processes import CpuClock, cpu_seconds
from milescli.core.silence import BUSY_TIMES, Silence, dump_stacks, is_stopped_process
from milescli.core.units import format_duration
from milescli.plan.types import TrainerLayout
from milescli.train.base import StepResult, TrainBatch, Trainer

CHECK_EVERY_S = 0.2
"""Seconds between two searches for a dead rank."""
PROFILES = ("start_profile", "stop_profile")
TRACE_TIMEOUT_S = 600.0
"""Time limit of writing a trace with many events."""
DEATH_GRACE_S = 5.0
"""Seconds to search for a dead process that explains the errors of others."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Describes a rank that does not answer."""

    why: str
    is_sure: bool
    """True if it cannot be busy."""


@dataclass(slots=True)
class RankGroup(Trainer):
    """Implements Trainer over the actors of its ranks."""

    cluster: Cluster
    ranks: list[ActorHandle]
    pids: list[int]
    """[ranks] process id on the rank's node."""
    layout: TrainerLayout
    step_timeout_s: float
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """All ranks take the same calls in the same order, because they wait for each other."""
    _clocks: defaultdict[int, CpuClock] = field(default_factory=lambda: defaultdict(CpuClock))
    """By process id."""

    async def look(self) -> list[Hang | None]:
        """Return [ranks] why a rank seems to hang; None if it responds. Raises WorkerDied if one
        has ended."""
        looks = await asyncio.gather(*(rank.look() for rank in self.ranks), return_exceptions=True)
        for died in looks:
            if isinstance(died, BaseException):
                raise died
        pairs = zip(self.ranks, self.pids, looks, strict=True)
        return [self._hang(rank, pid, does_speak=look is not None) for rank, pid, look in pairs]

    def _hang(self, rank: ActorHandle, pid: int, *, does_speak: bool) -> Hang | None:
        """Return why a rank seems to hang. A rank that computes on the driver's computer is slow,
        not hung: its caller limits how long that may take."""
        is_here = rank.node.is_driver
        is_busy = is_here and self._clocks[pid].is_busy(cpu_seconds(pid))
        if does_speak or is_busy:
            return None
        if is_here and is_stopped_process(pid):
            return Hang(f"its process {pid} is stopped (SIGSTOP)", is_sure=True)
        return Hang("it does not respond", is_sure=False)

    async def find_dead(self, *, within_s: float = 0.0) -> WorkerDied | None:
        """Return the error for a rank whose process has ended; wait for one up to `within_s`. A
        busy rank is not dead, nor is one that hangs."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                await self.look()
            except WorkerDied as error:
                return error
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(CHECK_EVERY_S)

    def dump_stacks(self) -> str | None:
        """Write the stacks of this computer's ranks beside their logs; return the file. Blocks."""
        here = {
            rank.name: pid
            for rank, pid in zip(self.ranks, self.pids, strict=True)
            if rank.node.is_driver
        }
        return dump_stacks(here, self.ranks[0].log_path.with_name("trainer.stacks.txt"))

    async def kill(self) -> None:
        """End all ranks at once."""
        await self.cluster.kill(self.ranks)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on every rank. Each rank gets the shard of its data-parallel rank in place
        of a batch; a shard is put into shared memory once. For a profile, the first argument lists
        the numbers of the ranks to call. Returns one result if the method joins them, else [ranks].
        Raises the error that best names the first cause."""
        numbers, timeout_s = list(range(len(self.ranks))), self.step_timeout_s
        if method in PROFILES:
            wanted, *args = args
            numbers = [rank for rank in wanted if rank in numbers]
            timeout_s = max(timeout_s, TRACE_TIMEOUT_S)
        batch = args[0] if args and isinstance(args[0], TrainBatch) else None
        arguments: list[tuple[Any, ...]] = [tuple(args)] * len(numbers)
        if batch is not None:
            shards = [await self.cluster.put(shard) for shard in batch.shards]
            arguments = [(shards[self.layout.dp_rank(rank)], *args[1:]) for rank in numbers]
        async with self._turn:
            runs = [
                self.ranks[rank].run(method, *own, timeout_s=timeout_s, **kwargs)
                for rank, own in zip(numbers, arguments, strict=True)
            ]
            results = await gather_all([asyncio.ensure_future(run) for run in runs])
        match method:
            case "step":
                logprobs = {n: own for each in results for n, own in each.logprobs.items()}
                memory = tuple(seen for each in results for seen in each.memory)
                return StepResult(report=results[0].report, logprobs=logprobs, memory=memory)
            case "score" | "score_by_teachers":
                assert batch is not None, "models score a batch"
                return self._join_results(batch, results)
            case "measure" | "finish_save":
                return results[0]
            case "is_written":
                return all(results)
            case "start_profile" | "stop_profile":
                return dict(zip(numbers, results, strict=True))
        return results

    def _join_results(self, batch: TrainBatch, results: list[Any]) -> list[Any]:
        """Join the ranks' results for the sequences of their shards, sequence by sequence."""
        whole: list[Any] = [None] * batch.num_sequences
        for rank, sequences in enumerate(results):
            if sequences is not None:
                shard = batch.shards[self.layout.dp_rank(rank)]
                for number, values in zip(shard.sequence_ids, sequences, strict=True):
                    whole[number] = values
        assert all(values is not None for values in whole), "a sequence was not scored"
        return whole


TIMED_METHODS = ("step", "apply", "score", "measure", "score_by_teachers", "publish", "verify")
"""Methods that take about equally long each time for batches of similar size. A save waits for
disks, and has its own time limit."""
MAX_SLOWDOWN = 5.0
"""Multiple of the longest time so far that the same call may take."""


class RankWatch:
    """Watches the ranks of one trainer, including their replacements. Belongs to one event loop."""

    def __init__(
        self, name: str, silence_s: float, *, bus: EventBus, step: Callable[[], int]
    ) -> None:
        """Set up the watch. `name`: of all ranks together; `step`: returns the number of completed
        steps."""
        self._name, self._bound_s, self._bus, self._step = name, silence_s, bus, step
        self._ranks: RankGroup | None = None
        self._silences = list[Silence]()
        """[ranks]"""
        self._longest = dict[tuple[str, int], float]()
        """(method, bits in the size of its batch) -> seconds."""
        self._doing: tuple[str, Silence] | None = None

    @contextmanager
    def timed(self, method: str, size_bytes: int) -> Iterator[None]:
        """Watch how long a call takes within the context. `size_bytes`: of its batch, or 0."""
        key, began = (method, size_bytes.bit_length()), time.monotonic()
        if method in TIMED_METHODS and (longest_s := self._longest_of(*key)):
            silence = Silence(
                worker=self._name, bound_s=self._bound_s, longest_s=MAX_SLOWDOWN * longest_s
            )
            self._doing = method, silence
        try:
            yield
            self._longest[key] = max(self._longest.get(key, 0.0), time.monotonic() - began)
        finally:
            self._doing = None

    def _longest_of(self, method: str, bits: int) -> float:
        """Return the most seconds that a call took for a batch of at least half the size; 0.0 if
        there was none."""
        seconds = self._longest.items()
        return max(
            (s for (what, size), s in seconds if what == method and size >= bits - 1), default=0.0
        )

    async def loss(self, ranks: RankGroup) -> WorkerDied | None:
        """Return the error for which the ranks must be replaced; None if no problem was found."""
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
            silence.observe(hang.why if hang else None, times=1.0 if is_sure else BUSY_TIMES)
            self._report(silence)
        for number, silence in enumerate(self._silences):
            if silence.is_too_long:
                return await self._hung(ranks, silence, number)
        return await self._overdue(ranks)

    async def _overdue(self, ranks: RankGroup) -> WorkerDied | None:
        """Return the error if all ranks answer, but the call takes far longer than ever before;
        else None."""
        if self._doing is None:
            return None
        method, silence = self._doing
        usual = format_duration(silence.longest_s / MAX_SLOWDOWN)
        # where an engine hangs in a publish, it is the first to be ended
        silence.observe(f"it is in `{method}`, which took at most {usual} before", times=BUSY_TIMES)
        self._report(silence)
        return await self._hung(ranks, silence, 0) if silence.is_too_long else None

    def _report(self, silence: Silence) -> None:
        if news := silence.warning(self._step()):
            self._bus.emit(news)

    async def _hung(self, ranks: RankGroup, silence: Silence, number: int) -> WorkerDied:
        """Return the error of rank `number`, or of all, after dumping their stacks."""
        doing = f", in `{self._doing[0]}`" if self._doing is not None else ""
        stacks = await in_thread(ranks.dump_stacks)
        log = ranks.ranks[number].log_path
        return WorkerDied(
            f"{silence.worker} has been silent for {silence.seconds:.0f} s{doing}",
            why=f"{silence.reason}{f'; stacks of all ranks: {stacks}' if stacks else ''}\n"
            f"last lines of its log:\n{last_log_lines(log)}",
            fix=[
                f"less {shlex.quote(str(log))}",
                f"--set machine.silence_s={4 * self._bound_s:.0f}",
            ],
        )
