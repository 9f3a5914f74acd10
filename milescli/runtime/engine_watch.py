"""Whether one engine lives, and speaks: what the system says of its processes, and whether it
answers while requests wait for it. One that does not, and computes, may be slow: it is given the
time that its work takes on the slowest hardware. Asked each second by `healing`, which acts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

from milescli.backends.sglang.http import EngineDied
from milescli.core.errors import WorkerDied
from milescli.core.files import last_log_lines
from milescli.core.run_processes import CpuClock
from milescli.core.silence import UNSURE, Silence
from milescli.core.types import EngineAddress
from milescli.models import load_facts, table
from milescli.models.costs import token_flops
from milescli.recipe.machine import MachineSettings
from milescli.runtime.engines import EngineActors

ASKED_AFTER_S = 5.0
"""Without a reply, while requests wait: then it is asked whether it is well. So long it may take to
say so, too, before it counts as silent."""
PASS_TOKENS = 16_384
"""New tokens that an engine takes in one pass at most, between two of which it answers."""
SLOWEST_FLOPS = {"cpu": 1e9, "cuda": 1e13, "rocm": 1e13}
"""Operations a second, of a core or of a device, far below what is usual: a core of a busy machine
was seen to do 2e10."""


class WatchedFleet(Protocol):
    """Who asks the engines, as those that keep them alive see it; see SglangFleet."""

    on_death: Callable[[EngineDied], None] | None

    @property
    def engines(self) -> Sequence[EngineAddress]:
        """That are asked."""
        ...

    def remove(self, error: EngineDied) -> None:
        """Ask this engine no more."""

    def num_waiting(self, url: str) -> int:
        """Requests that the engine at this URL has not replied to."""
        ...

    def silent_s(self, url: str) -> float:
        """Seconds since it said anything."""
        ...

    async def answers(self, url: str) -> bool:
        """Whether it speaks."""
        ...


class EngineWatch:
    """Of one engine, from its start to its death. Belongs to one event loop."""

    def __init__(
        self, engine: EngineActors, *, fleet: WatchedFleet, settings: MachineSettings
    ) -> None:
        """`fleet`: that asks it."""
        self.engine, self._fleet = engine, fleet
        self.silence = Silence(worker=engine.name, bound_s=settings.silence_s)
        self._patience_s = settings.start_timeout_s
        """Until it has replied once: it may compile what it needs first."""
        self._clock = CpuClock()
        self._unheard_since: float | None = None
        self._waited_since: float | None = None
        self._has_replied = False
        self._question: asyncio.Task[bool] | None = None
        self._asked_at = 0.0
        self._is_unwell = False
        """By the last reply to a question, or by none."""

    async def look(self) -> None:
        """Raises WorkerDied where it has ended."""
        look = await self.engine.look()
        is_busy = look.stopped is None and self._clock.is_busy(look.cpu_s)
        unheard = self._unheard()
        if look.stopped is not None:
            waiting = self._fleet.num_waiting(self.engine.url)
            self.silence.look(f"{look.stopped}, and {waiting} requests wait for it")
        else:
            self.silence.look(self._unexplained(unheard, is_busy=is_busy), times=UNSURE)

    def close(self) -> None:
        """Ask nothing more."""
        if self._question is not None:
            self._question.cancel()

    def _unexplained(self, unheard: str | None, *, is_busy: bool) -> str | None:
        """The same, unless it may still be at its work: on a CPU it computes then, on a device
        nothing is seen of that."""
        if unheard is None:
            self._unheard_since = None
            return None
        self._unheard_since = self._unheard_since or time.monotonic()
        may_work = is_busy or self.engine.specs[0].device_kind != "cpu"
        is_at_work = may_work and time.monotonic() < self._unheard_since + self._work_s()
        return None if is_at_work else unheard

    def _work_s(self) -> float:
        """What one pass over what it was asked may take."""
        spec, waiting = self.engine.specs[0], self._fleet.num_waiting(self.engine.url)
        tokens = min(waiting * spec.context_length, PASS_TOKENS)
        each = spec.cpu_threads if spec.device_kind == "cpu" else 1
        return tokens * self._token_flops / (SLOWEST_FLOPS[spec.device_kind] * each * spec.tp)

    @cached_property
    def _token_flops(self) -> float:
        spec = self.engine.specs[0]
        return token_flops(table(load_facts(spec.model_dir))).forward_mean(spec.context_length)

    def _unheard(self) -> str | None:
        """That requests wait for it in vain."""
        url, now = self.engine.url, time.monotonic()
        waiting = self._fleet.num_waiting(url)
        if not waiting:
            self._waited_since, self._is_unwell = None, False
            return None
        if self._waited_since is None:
            self._waited_since = now
        if self._fleet.silent_s(url) < min(ASKED_AFTER_S, now - self._waited_since):
            self._has_replied, self._is_unwell = True, False
            return None
        self._ask(url, now)
        if not self._is_unwell:
            return None
        if not self._has_replied and now - self._waited_since < self._patience_s:
            return None
        return f"it does not answer, and {waiting} requests wait for it"

    def _ask(self, url: str, now: float) -> None:
        question = self._question
        if question is None:
            self._asked_at = now
            self._question = asyncio.ensure_future(self._fleet.answers(url))
        elif not question.done():
            self._is_unwell |= now - self._asked_at > ASKED_AFTER_S
        else:
            self._question = None
            self._is_unwell = bool(question.exception()) or not question.result()
            self._has_replied |= not self._is_unwell

    async def death(self) -> WorkerDied:
        """The error of an engine that hangs. Writes down where, first."""
        spec, silence = self.engine.specs[0], self.silence
        stacks = await self.engine.dump_stacks()
        where = "".join(f"\nits stacks: {file}" for file in stacks)
        return WorkerDied(
            f"{self.engine.name} has not spoken for {silence.seconds:.0f} s",
            why=f"{silence.reason}{where}\nlast lines of its log:\n{last_log_lines(spec.log_path)}",
            fix=[f"less {spec.log_path}", f"--set machine.silence_s={4 * silence.bound_s:.0f}"],
        )
