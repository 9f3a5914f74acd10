"""Runs the environments of many episodes at once, in processes of their own, here and on other
nodes of the run. If one hangs, its own episode fails with an error that names the line, and the
other episodes of that process are replayed to the same point. The runtime starts processes on other
nodes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from milescli.core.errors import AgentError, MachineError, RecipeError
from milescli.data.images import Content
from milescli.recipe.agents import EnvironmentSettings
from milescli.rollout.environments import (
    Environment,
    Step,
    checked_start,
    checked_step,
    create_environment,
)
from milescli.workers.async_worker import CallProcess, NewCallProcess, QuickCall, QuickCalls
from milescli.workers.worker import CallFailed

NUM_FRAMES_SHOWN = 6
"""Number of innermost frames of a call that an error shows."""
MAX_IDLE = 256
"""Largest number of environments that are kept for later episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Starts a new episode, and repeats its earlier actions if its process had to be ended."""

    name: str
    settings: dict[str, Any]
    prompt: str
    label: str | None
    seed: int
    actions: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Act:
    """Requests one step, for one turn of the policy."""

    text: str


@dataclass(frozen=True, slots=True)
class Where:
    """Requests the lines that an episode's environment is executing."""


@dataclass(frozen=True, slots=True)
class End:
    """Ends the episode."""


EpisodeCall = Begin | Act | Where | End
_PLAYING: dict[int, Environment] = {}
_IDLE: list[Environment] = []
_THREADS: dict[int, int] = {}
"""Episode number -> id of the thread that runs its current call."""


def act(episode: int, what: EpisodeCall) -> Content | Step | None:
    """Handle one call: Begin returns the first observation, Act a Step, Where text, End None.
    Raises ValueError if the environment returns anything else, and what it raises."""
    return _where(episode) if isinstance(what, Where) else _handle_call(episode, what)


act.in_threads = True  # type: ignore[attr-defined]  # workers.child_threads runs many at once


def _handle_call(episode: int, what: EpisodeCall) -> Content | Step | None:
    _THREADS[episode] = threading.get_ident()
    try:
        return _run_call(episode, what)
    finally:
        del _THREADS[episode]


def _run_call(episode: int, what: EpisodeCall) -> Content | Step | None:
    if isinstance(what, End):
        _end(episode)
        return None
    if isinstance(what, Act):
        environment = _PLAYING.pop(episode)  # one that raises is not used again
        step = checked_step(environment.step(what.text))
        _PLAYING[episode] = environment
        return step
    assert isinstance(what, Begin)
    environment = _IDLE.pop() if _IDLE else create_environment(what.name, what.settings)
    start = checked_start(environment.reset(prompt=what.prompt, label=what.label, seed=what.seed))
    for action in what.actions:
        environment.step(action)
    _PLAYING[episode] = environment
    return start


def _end(episode: int) -> None:
    environment = _PLAYING.pop(episode, None)
    if environment is None:
        return
    if len(_IDLE) < MAX_IDLE:
        _IDLE.append(environment)
    elif (close := getattr(environment, "close", None)) is not None:
        close()


def _where(episode: int) -> str:
    """Return the lines of the episode's current call, innermost last; empty if none runs."""
    frame = sys._current_frames().get(_THREADS.get(episode, 0))
    lines = list[str]()
    for line in traceback.extract_stack(frame) if frame is not None else ():
        lines.append(f"\n  {line.filename}, line {line.lineno}, in {line.name}")
        if line.filename == __file__:  # the environment's own come after ours
            lines.clear()
    return "".join(lines[-NUM_FRAMES_SHOWN:])


_TARGET = "milescli.agents.environment_fleet:act"
MAX_REPLAYS = 3
"""Number of times that an episode is replayed because its process ended; after that it fails."""
_FIRST_TIMEOUT_S = 120.0
"""Seconds for the imports of an environment, in addition to `step_timeout_s`."""
_WHERE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherNode:
    """Describes another node of the run that can host environments."""

    name: str
    """For errors: `node 10.0.0.2 (gpu-2)`."""
    num_cores: int
    process: NewCallProcess


@dataclass(eq=False, slots=True)
class _ProcessSlot:
    """Holds one environment process, or the one that replaced it."""

    memory_bytes: int
    new_process: NewCallProcess = QuickCalls
    node: str = ""
    """Name of the node it runs on; empty: this one."""
    process: CallProcess = field(init=False)
    num_episodes: int = 0
    has_begun: bool = False

    def __post_init__(self) -> None:
        self.process = self._new()

    def end_process(self, process: CallProcess) -> None:
        """End `process`, unless it was replaced already; the next call starts another."""
        if process is self.process:
            process.close()
            self.process, self.has_begun = self._new(), False

    def _new(self) -> CallProcess:
        return self.new_process(
            _TARGET,
            memory_bytes=self.memory_bytes,
            memory_key="rollout.environment.memory_gib",
        )


@dataclass(eq=False, slots=True)
class _SentCall:
    """Holds one call that was sent to a process."""

    what: EpisodeCall
    place: _ProcessSlot
    process: CallProcess
    limit_s: float = 0.0
    ends: float = 0.0
    """Deadline of the call, by the clock of the event loop."""
    call: QuickCall | None = None
    """None while the process is still starting."""


class EnvironmentFleet:
    """Manages all environments of this driver. Belongs to one event loop."""

    def __init__(self, settings: EnvironmentSettings, *, num_processes: int) -> None:
        """Start with `num_processes` on this computer."""
        assert settings.name is not None, "the recipe's check asks for a name"
        self.name = settings.name
        self._settings = settings
        self._memory_bytes = int(settings.memory_gib * 1024**3)
        self._places = [_ProcessSlot(self._memory_bytes) for _ in range(num_processes)]
        self._numbers = count()
        self.num_hung = 0
        """Number of environments that were abandoned because they did not answer."""

    def spread(self, nodes: Sequence[OtherNode]) -> None:
        """Distribute later episodes over these nodes too, with as many processes on each as
        here."""
        for node in nodes:
            self._places += [
                _ProcessSlot(self._memory_bytes, node.process, node.name)
                for _ in range(num_processes(self._settings, num_cores=node.num_cores))
            ]

    def leave_nodes(self) -> None:
        """Play later episodes only on this computer. Call it when no episode is in progress."""
        for place in self._places:
            if place.node:
                place.end_process(place.process)  # an episode that ends later finds its own gone
        self._places = [place for place in self._places if not place.node]

    @contextlib.asynccontextmanager
    async def episode(self, prompt: str, label: str | None, seed: int) -> AsyncIterator[Episode]:
        """Provide an episode, which ends with the context."""
        begin = Begin(
            name=self.name,
            settings=dict(self._settings.settings),
            prompt=prompt,
            label=label,
            seed=seed,
        )
        place = self._least_busy()
        episode = Episode(self, place, next(self._numbers), begin)
        place.num_episodes += 1
        try:
            yield episode
        finally:
            episode.place.num_episodes -= 1
            episode.end()

    def move(self, episode: Episode) -> None:
        """Move the environment of an episode from a process on another node, which has ended, to
        the least busy one."""
        if episode.place.node:
            episode.place.num_episodes -= 1
            episode.place = self._least_busy()
            episode.place.num_episodes += 1

    def _least_busy(self) -> _ProcessSlot:
        return min(self._places, key=lambda place: place.num_episodes)

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes on this computer."""
        pids = [place.process.pid for place in self._places]
        return [pid for pid in pids if pid is not None]

    def close(self) -> None:
        """End all processes."""
        for place in self._places:
            place.end_process(place.process)  # an episode that ends later finds its own gone

    async def send_call(self, episode: Episode, what: EpisodeCall) -> Any:
        """Send one call to the episode's process, once, and return the reply. Raises AgentError if
        the environment raises or hangs, CallFailed if its process has ended. If the waiter is
        cancelled, `episode.pending` is the call that is still running."""
        place = episode.place
        sent = _SentCall(what=what, place=place, process=place.process)
        limit_s = self._settings.step_timeout_s + (0 if place.has_begun else _FIRST_TIMEOUT_S)
        sent.limit_s, sent.ends = limit_s, asyncio.get_running_loop().time() + limit_s
        try:
            return await self.reply_to(sent, episode)
        except asyncio.CancelledError:
            episode.pending = sent if sent.call is not None else None
            raise

    async def reply_to(self, sent: _SentCall, episode: Episode) -> Any:
        """Return the reply to a call that was sent now or before. Raises as `send_call`."""
        place, process = sent.place, sent.process
        try:
            async with asyncio.timeout_at(sent.ends):
                if sent.call is None:
                    sent.call = await process.begin(episode.number, sent.what)
                answered = await sent.call.wait_again()
        except TimeoutError:
            where = await self._where(place, process, episode)
            place.end_process(process)
            if where is None:  # it answers nobody, or is gone: whose fault that is cannot be told
                why = f"its process did not answer within {sent.limit_s:g} s"
                raise CallFailed(why) from None
            self.num_hung += 1
            raise self._error(
                f"the environment `{self.name}` did not respond within {sent.limit_s:g} s",
                why=f"{_describe_call(sent.what)}{where}",
                node=place.node,
            ) from None
        except CallFailed as error:
            if process is place.process and process.lives:
                raise self._error(
                    f"the environment `{self.name}` failed", why=str(error), node=place.node
                ) from None
            place.end_process(process)
            raise
        except (RecipeError, MachineError, AgentError) as error:
            if not place.node:
                raise
            what = f"{error.what} on {place.node}"  # it may work elsewhere
            raise type(error)(what, why=error.why, fix=error.fixes) from None
        place.has_begun = True
        return answered

    def _error(self, what: str, *, why: str, node: str) -> AgentError:
        what = f"{what} on {node}" if node else what
        fix = f"miles env check {self.name}   # holds it to what an environment has to do"
        return AgentError(what, why=why, fix=fix)

    async def _where(
        self, place: _ProcessSlot, process: CallProcess, episode: Episode
    ) -> str | None:
        """Return the part of an error that names the lines at which an episode hangs; None if the
        process does not answer, or was ended because of another episode."""
        if process is not place.process:
            return None
        with contextlib.suppress(TimeoutError, CallFailed):
            async with asyncio.timeout(_WHERE_TIMEOUT_S):
                call = await process.begin(episode.number, Where())
                lines = await call.future
                return f"; it was at{lines}" if lines else ""
        return None


@dataclass(eq=False, slots=True)
class Episode:
    """Represents one environment, from its reset on. One call at a time."""

    fleet: EnvironmentFleet
    place: _ProcessSlot
    number: int
    start: Begin
    _process: CallProcess | None = None
    """Process in which the episode was started."""
    _num_replays: int = 0
    _actions: list[str] = field(default_factory=list)
    """Actions of the episode so far."""
    pending: _SentCall | None = None
    """Call that is still running after its waiter was cancelled."""

    async def reset(self) -> Content | None:
        """Return the first observation; None: the prompt itself. Raises AgentError."""
        return await self._call(None)

    async def step(self, action: str) -> Step:
        """Take one action in the environment. Raises AgentError."""
        step = await self._call(Act(action))
        self._actions.append(action)
        return step

    def end(self) -> None:
        """Abandon the episode; a call in progress is still bounded."""
        ending = asyncio.ensure_future(self._end())
        _ENDING.add(ending)
        ending.add_done_callback(_ENDING.discard)

    async def _call(self, what: Act | None) -> Any:
        """Return the reply to `what`; None requests the first observation. If the process has ended
        in the meantime, replay the earlier actions first."""
        while True:
            try:
                if self._process is not self.place.process:
                    process = self.place.process
                    start = replace(self.start, actions=tuple(self._actions))
                    start = await self.fleet.send_call(self, start)
                    self._process = process
                    if what is None:
                        return start
                assert what is not None, "an episode is reset once"
                return await self.fleet.send_call(self, what)
            except CallFailed as error:
                self._num_replays += 1
                if self._num_replays > MAX_REPLAYS:
                    raise AgentError(
                        f"the process of the environment `{self.fleet.name}` keeps ending",
                        why=str(error),
                        fix=f"miles env check {self.fleet.name}",
                    ) from None
                self.fleet.move(self)

    async def _end(self) -> None:
        if self.pending is not None:
            with contextlib.suppress(AgentError, CallFailed):
                await self.fleet.reply_to(self.pending, self)
        if self._process is self.place.process:
            with contextlib.suppress(AgentError, CallFailed):
                await self.fleet.send_call(self, End())


def num_processes(settings: EnvironmentSettings, *, num_cores: int) -> int:
    """Return the default number of processes on a node with that many cores."""
    return settings.processes or max(num_cores // 2, 1)


_ENDING: set[asyncio.Future[None]] = set()


def _describe_call(what: EpisodeCall) -> str:
    if isinstance(what, Act):
        return f"it was told {what.text!r:.80}"
    return "it was begun" if isinstance(what, Begin) else "it was ended"
