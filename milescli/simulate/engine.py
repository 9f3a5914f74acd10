"""Engines with continuous batching and a KV cache, as processes of SimPy. All requests of an engine
move one token together, so the next end is a closed form: one exact event for each response, none
for a token."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

END_TOLERANCE = 1e-6
"""Tokens within which two responses count as ending at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """Describes the speed and the capacity of an engine. A decode step of `batch` requests with
    `context` tokens together takes step_s + request_s * batch + context_s * context."""

    step_s: float
    """Seconds of a decode step at any load: the weights are read once."""
    request_s: float = 0.0
    """Additional seconds for each running request."""
    context_s: float = 0.0
    """Additional seconds for each token of context: its keys and values are read."""
    prefill_s: float = 0.0
    """Seconds for each token of a prefill, during which nothing is decoded."""
    slots: int = 256
    """Requests that run at once."""
    cache_tokens: float = math.inf
    """Tokens that the KV cache holds. A request takes its prompt and half its response, which is
    its mean over time."""

    def seconds(self, tokens: float, *, batch: int, context: float) -> float:
        """Return the seconds in which each of `batch` requests generates `tokens` tokens, while the
        contexts grow. For whole tokens it is the sum of the steps."""
        grows = self.context_s * batch
        first = self.step_s + self.request_s * batch + self.context_s * context - grows / 2
        return first * tokens + grows * tokens * tokens / 2

    def tokens(self, seconds: float, *, batch: int, context: float) -> float:
        """Return the tokens that each request generates in `seconds`: the inverse of `seconds`."""
        grows = self.context_s * batch
        first = self.step_s + self.request_s * batch + self.context_s * context - grows / 2
        return 2 * seconds / (first + math.sqrt(first * first + 2 * grows * seconds))


@dataclass(slots=True, eq=False)
class Group:
    """Holds the responses to one prompt."""

    number: int
    """Counted from 0 in the order in which groups begin."""
    lengths: tuple[int, ...]
    """[samples] tokens of each response."""
    began: int = 0
    """Weight version when it began."""
    unfinished: int = 0
    tokens: float = 0.0
    """Tokens of all sequences, prompts included."""
    oldest: int = 1 << 62
    """Weight version of the oldest token."""
    retries: int = 0
    is_dead: bool = False
    """True if the group was given up: nothing more of it is generated."""


@dataclass(slots=True, eq=False)
class Request:
    """Describes one response, or one turn of an episode, in progress."""

    group: Group
    prompt: float
    """Tokens before the first generated one."""
    left: float
    """Tokens to the end of the turn."""
    prefill: float
    """Tokens to prefill when it begins."""
    turns_left: int = 0
    """Turns after this one."""
    turn: float = 0.0
    """Tokens of each turn."""
    made: float = 0.0
    """Tokens that no failure of an engine can lose."""
    start: float = 0.0
    """Count of its engine when the request began there."""
    reserved_tokens: float = 0.0
    """Tokens of the cache that it occupies."""


@dataclass(slots=True, eq=False)
class Engine:
    """Simulates one engine. Calls `on_end(engine, request)` for each turn that ends."""

    env: simpy.Environment
    speed: EngineSpeed
    on_end: Callable[[Engine, Request], None]
    fleet: Fleet
    place: int
    """Index in its fleet."""
    slowness: float = 1.0
    """Factor on all its seconds; above 1 it is a straggler."""
    running: list[tuple[float, int, Request]] = field(default_factory=list)
    """Heap of (count at the end, number, request)."""
    queue: deque[Request] = field(default_factory=deque)
    version: int = 0
    is_open: bool = True
    """False during a publication, or while it is replaced."""
    is_up: bool = True
    num_open: int = 0
    """Number of its requests that have not ended."""
    count: float = 0.0
    """Tokens that a request which always ran here would have generated."""
    at: float = 0.0
    context: float = 0.0
    cache_used: float = 0.0
    """Tokens of the cache that running requests occupy."""
    prefill_left_s: float = 0.0
    """Seconds of prefill before decoding continues."""
    busy_s: float = 0.0
    is_busy: bool = False
    num_events: int = 0
    _stamp: int = 0
    """Invalidates older timeouts."""
    _numbers: int = 0

    def settle(self) -> None:
        """Update count and contexts to the current time."""
        span, self.at = self.env.now - self.at, self.env.now
        if not self.running or not self.is_open or span <= 0:
            return
        self.busy_s += span
        paid = min(self.prefill_left_s, span)
        self.prefill_left_s -= paid
        batch = len(self.running)
        made = self.speed.tokens((span - paid) / self.slowness, batch=batch, context=self.context)
        self.count += made
        self.context += made * batch

    def proceed(self) -> None:
        """Admit the requests that fit, and schedule the next end."""
        self.settle()
        speed = self.speed
        while self.is_open and self.queue and len(self.running) < speed.slots:
            request = self.queue[0]
            tokens_needed = request.prompt + request.made + request.left / 2
            if self.running and self.cache_used + tokens_needed > speed.cache_tokens:
                break
            self.queue.popleft()
            request.start, request.reserved_tokens = self.count, tokens_needed
            request.group.oldest = min(request.group.oldest, self.version)
            self._numbers += 1
            heapq.heappush(self.running, (self.count + request.left, self._numbers, request))
            self.cache_used += tokens_needed
            self.context += request.prompt + request.made
            self.prefill_left_s += request.prefill * speed.prefill_s * self.slowness
        self._stamp += 1
        if self.running and self.is_open:
            tokens = max(self.running[0][0] - self.count, 0.0)
            wait = speed.seconds(tokens, batch=len(self.running), context=self.context)
            due = self.env.timeout(self.prefill_left_s + wait * self.slowness, self._stamp)
            due.callbacks.append(self._ended)
        self._note_busy()

    def _note_busy(self) -> None:
        if self.is_busy != (is_busy := bool(self.running) and self.is_open):
            self.is_busy = is_busy
            self.fleet.changes.append((self.env.now, 1 if is_busy else -1))

    def _ended(self, event: simpy.Event) -> None:
        if event.value != self._stamp:
            return
        self.num_events += 1
        self.settle()
        self.count = max(self.count, self.running[0][0])
        while self.running and self.running[0][0] <= self.count + END_TOLERANCE:
            _, _, request = heapq.heappop(self.running)
            request.made += request.left
            self.num_open -= 1
            self._release(request, request.made)
            self.on_end(self, request)
        self.fleet.changed[self.place] = self
        self.fleet.flush()

    def _release(self, request: Request, made: float) -> None:
        self.cache_used -= request.reserved_tokens
        self.context -= request.prompt + made
        if not self.running:
            self.cache_used = self.context = self.prefill_left_s = 0.0

    def pause(self) -> None:
        """Stop decoding during a publication."""
        self.settle()
        self.is_open = False
        self._stamp += 1
        self._note_busy()

    def resume(self, version: int, *, restarts: bool) -> None:
        """Continue with new weights: the caches are empty, so every running response is prefilled
        again up to its last token, or restarts."""
        self.settle()
        self.version, self.is_open = version, self.is_up
        if restarts:
            self._put_back()
        else:
            self.prefill_left_s = self.context * self.speed.prefill_s * self.slowness
            for end, _, request in self.running:
                request.made += self.count - request.start
                request.left, request.start = end - self.count, self.count
        self.proceed()

    def _put_back(self) -> None:
        """Queue the running requests with the tokens that they cannot lose."""
        for _, _, request in sorted(self.running, reverse=True):
            request.prefill = request.prompt + request.made
            self.queue.appendleft(request)
        self.running.clear()
        self.cache_used = self.context = self.prefill_left_s = 0.0

    def fail(self) -> list[Request]:
        """Fail, and return the requests, which go to other engines. Loses tokens generated since
        the last publication."""
        self.settle()
        self._put_back()
        self.is_open = self.is_up = False
        self._stamp += 1
        self._note_busy()
        lost = list(self.queue)
        self.queue.clear()
        self.num_open -= len(lost)
        return lost

    def remove(self) -> None:
        """Remove the requests of groups that were given up."""
        self.settle()
        kept = [entry for entry in self.running if not entry[2].group.is_dead]
        gone = [entry[2] for entry in self.running if entry[2].group.is_dead]
        queued = [request for request in self.queue if not request.group.is_dead]
        self.num_open -= len(gone) + len(self.queue) - len(queued)
        self.running, self.queue = kept, deque(queued)
        heapq.heapify(self.running)
        for request in gone:
            self._release(request, request.made + self.count - request.start)
        self.fleet.note(self)
        self.proceed()


@dataclass(slots=True, eq=False)
class Fleet:
    """Holds all engines. A request goes to the engine with the fewest requests."""

    engines: list[Engine] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, 1 or -1): an engine began to work, or stopped."""
    changed: dict[int, Engine] = field(default_factory=dict)
    """Index -> engine whose requests changed since the last `flush`."""
    _fewest: list[tuple[int, int]] = field(default_factory=list)
    """Heap of (open requests, place); outdated entries are dropped when met."""

    def note(self, engine: Engine) -> None:
        """Record that the engine's number of requests has changed."""
        if engine.is_up:
            heapq.heappush(self._fewest, (engine.num_open, engine.place))

    def submit(self, request: Request, engine: Engine | None = None) -> bool:
        """Give a request to this engine, or to the one with the fewest; return False if no engine
        is up. Takes effect at `flush`."""
        if engine is None or not engine.is_up:
            engine = self._least_loaded()
        if engine is None:
            return False
        engine.queue.append(request)
        engine.num_open += 1
        self.note(engine)
        self.changed[engine.place] = engine
        return True

    def _least_loaded(self) -> Engine | None:
        while self._fewest:
            num_open, place = heapq.heappop(self._fewest)
            engine = self.engines[place]
            if engine.is_up and engine.num_open == num_open:
                return engine
        return None

    def flush(self) -> None:
        """Let the engines with changed requests proceed."""
        while self.changed:
            changed, self.changed = self.changed, {}
            for engine in changed.values():
                engine.proceed()

    def up(self) -> list[Engine]:
        """Return the engines that are up."""
        return [engine for engine in self.engines if engine.is_up]
