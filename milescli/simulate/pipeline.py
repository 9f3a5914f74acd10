"""Simulates one run: groups begin within the bound on staleness, engines generate them, the trainer
takes whole groups and publishes. The rules are those of `rollout.collect` and of recovery. Called
by `candidates`, and by bench/simulate.py for published results."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import simpy

from milescli.simulate.engine import Engine, EngineSpeed, Fleet, Group, Request
from milescli.simulate.lengths import Lengths

MAX_RETRIES = 3
"""Retries of a group that became too old, as in `rollout.collect.completion_order`."""
WARM_SHARE = 1 / 3
"""Share of the steps at the beginning that no figure counts: the queues fill."""

Turns = tuple[int, float, float]
"""(turns of an episode, mean seconds of a tool between them, their standard deviation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Describes what fails, how often, and the cost."""

    engine_mtbf_s: float
    """Mean seconds between failures of one engine."""
    trainer_mtbf_s: float
    """Mean seconds between failures of any trainer rank."""
    restart_s: float
    """Seconds until an engine, or all trainer ranks, are back."""
    save_every: int
    """Steps between checkpoints, or copies in memory: later steps are trained again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Describes one run."""

    num_engines: int
    speed: EngineSpeed
    train_token_s: float
    """Seconds of training for each token, prompts included."""
    publish_s: float
    prompts_per_step: int
    samples_per_prompt: int
    prompt_tokens: float
    staleness: float = 0.0
    """Groups begun are at most (version + 1 + staleness) x prompts_per_step. Whole numbers are
    `rollout.max_staleness`; other frameworks bound by fractions."""
    order: Literal["prompts", "done"] = "prompts"
    stale_groups: Literal["wait", "retry", "drop", "keep"] = "wait"
    """keep: no group is too old, as in frameworks that only bound which groups begin."""
    on_update: Literal["continue", "drain", "abort"] = "continue"
    over_sampling: float = 1.0
    """This many times the groups of a step begin, and the step takes those that finish first; only
    at staleness 0."""
    kept_share: float = 1.0
    """Share of the groups that the filter keeps; another group replaces each refused one."""
    max_open: int | None = None
    """Most open responses; None: as many as the bound on staleness allows."""
    parts: int = 1
    """Number of equal parts in which the trainer takes a step's groups, each as soon as it is
    complete."""
    turns: Turns = (1, 0.0, 0.0)
    straggler_share: float = 0.0
    straggler_factor: float = 1.0
    """Factor on all times of that share of the engines."""
    failures: Failures | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Describes what the trainer did from one time to another, in seconds since the beginning."""

    what: Literal["train", "wait", "publish", "replaced"]
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Holds the figures of a simulated run, without its first third."""

    step_s: float
    """Mean seconds between publications."""
    samples_per_s: float
    tokens_per_s: float
    """Trained tokens, prompts included."""
    engines_idle: float
    """Share of the engines' time in which nothing runs on them, publications included."""
    rollout_idle: float
    """Share of the time in which no response is open anywhere."""
    trainer_wait: float
    """Share of the time in which the trainer waits for groups."""
    staleness_mean: float
    """Version when a step takes a group, minus that of the group's oldest token."""
    staleness_max: int
    running_mean: float
    """Number of open responses, mean over time."""
    given_up: int
    """Groups that were given up: too old, or not needed by over-sampling."""
    failures: int
    num_events: int


@dataclass(slots=True)
class _Counts:
    """Holds the counts so far; figures are differences of two."""

    at_s: float = 0.0
    busy_s: float = 0.0
    closed_s: float = 0.0
    open_s: float = 0.0
    wait_s: float = 0.0
    samples: int = 0
    tokens: float = 0.0
    groups: int = 0


@dataclass(slots=True)
class Simulation:
    """Simulates one run."""

    settings: Settings
    lengths: Lengths
    steps: int
    seed: int = 0
    env: simpy.Environment = field(default_factory=simpy.Environment)
    fleet: Fleet = field(default_factory=Fleet)
    version: int = 0
    num_begun: int = 0
    """Number of groups, without those that were given up and do not restart."""
    trained: list[int] = field(default_factory=list)
    """Numbers of the groups that steps took."""
    ages: list[int] = field(default_factory=list)
    """[trained groups] staleness."""
    published_s: list[float] = field(default_factory=list)
    """[steps] seconds at the end of each publication."""
    spans: list[Span] = field(default_factory=list)
    open_groups: dict[int, Group] = field(default_factory=dict)
    """Number -> unfinished group."""
    ready: list[Group] = field(default_factory=list)
    """Finished groups that no step has taken, in the order of finishing."""
    num_given_up: int = 0
    """Number of groups that did not restart."""
    failures: int = 0
    _rng: np.random.Generator = field(init=False)
    _failure_rng: random.Random = field(init=False)
    _drawn: Iterator[np.ndarray] = field(init=False)
    _changed: simpy.Event | None = None
    _drains: bool = False
    _publishes: bool = False
    _num_open: int = 0
    _opened_at: float = 0.0
    _counts: _Counts = field(default_factory=_Counts)
    _first: _Counts = field(default_factory=_Counts)
    _old: Counter[int] = field(default_factory=Counter)
    """Weight version -> number of unfinished groups that began with it."""
    _in_batch: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Step -> number of its finished groups, in the order of the prompts."""
    _stranded: list[Request] = field(default_factory=list)
    """Requests for which no engine was up."""
    _unsaved_s: list[float] = field(default_factory=list)
    """Seconds of training of each step since the last checkpoint."""

    def run(self) -> Outcome:
        """Simulate all steps."""
        own = self.settings
        self._rng, self._failure_rng = np.random.default_rng(self.seed), random.Random(self.seed)
        self._drawn = self._draw_lengths()
        slow = round(own.straggler_share * own.num_engines)
        for place in range(own.num_engines):
            factor = own.straggler_factor if place < slow else 1.0
            engine = Engine(self.env, own.speed, self._ended, self.fleet, place, factor)
            self.fleet.engines.append(engine)
            self.fleet.note(engine)
        if own.failures is not None:
            self.env.process(self._engines_fail(own.failures))
        self._begin_groups()
        self.env.run(until=self.env.process(self._trainer()))
        return self._outcome()

    # ------------------------------------------------------------------ rollout

    @property
    def _max_begun(self) -> float:
        """Return the number of groups that may have begun."""
        own = self.settings
        steps = own.over_sampling if own.staleness == 0 else 1 + own.staleness
        return own.prompts_per_step * (self.version + steps)

    def _draw_lengths(self) -> Iterator[np.ndarray]:
        while True:
            yield from self.lengths.draw(
                self._rng, groups=256, samples=self.settings.samples_per_prompt
            )

    def _begin_groups(self) -> None:
        """Begin as many groups as the bound allows."""
        most = math.inf if self.settings.max_open is None else self.settings.max_open
        while (
            not self._drains
            and self.num_begun + 1 <= self._max_begun + 1e-9
            and self._num_open + self.settings.samples_per_prompt <= most
        ):
            number, lengths = self.num_begun + self.num_given_up, next(self._drawn).tolist()
            self.num_begun += 1
            self._begin(Group(number, tuple(lengths)))
        self.fleet.flush()

    def _begin(self, group: Group) -> None:
        own, lengths = self.settings, group.lengths
        group.began, group.unfinished = self.version, len(lengths)
        group.tokens = sum(lengths) + len(lengths) * own.prompt_tokens
        self.open_groups[group.number] = group
        self._old[group.began] += 1
        turns = own.turns[0]
        for place, length in enumerate(lengths):
            prefill = own.prompt_tokens * (place == 0)
            request = Request(
                group, own.prompt_tokens, length / turns, prefill, turns - 1, length / turns
            )
            self._submit(request)
        self._count_open(len(lengths))

    def _submit(self, request: Request, engine: Engine | None = None) -> None:
        if not self.fleet.submit(request, engine):
            self._stranded.append(request)

    def _count_open(self, more: int) -> None:
        """Count the time without open responses, and their number over time."""
        span, self._opened_at = self.env.now - self._opened_at, self.env.now
        self._counts.open_s += span * self._num_open
        self._counts.closed_s += span * (self._num_open == 0)
        self._num_open += more
        if not self._num_open:
            self._wake()

    def _ended(self, engine: Engine, request: Request) -> None:
        """Handle the end of a turn on an engine."""
        self.fleet.note(engine)
        if request.turns_left:
            request.turns_left, request.left, request.prefill = (
                request.turns_left - 1,
                request.turn,
                0.0,
            )
            _, mean, sigma = self.settings.turns
            wait = max(0.0, self._failure_rng.gauss(mean, sigma))
            self.env.timeout(wait, (request, engine)).callbacks.append(self._answered)
            return
        group = request.group
        self._count_open(-1)
        group.unfinished -= 1
        if group.unfinished == 0:
            del self.open_groups[group.number]
            self._old[group.began] -= 1
            if self._failure_rng.random() >= self.settings.kept_share:
                self._begin(Group(group.number, tuple(next(self._drawn).tolist())))
                return
            self.ready.append(group)
            self._in_batch[group.number // self.settings.prompts_per_step] += 1
            self._wake()
        if self.settings.max_open is not None:
            self._begin_groups()

    def _answered(self, event: simpy.Event) -> None:
        """Continue an episode after the answer of a tool."""
        request, engine = event.value
        if not request.group.is_dead:
            self._submit(request, engine)
            self.fleet.flush()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.triggered:
            self._changed.succeed()

    # ------------------------------------------------------------------ trainer

    def _trainer(self) -> Iterator[simpy.Event]:
        own = self.settings
        while len(self.published_s) < self.steps:
            for _ in range(own.parts):
                yield from self._wait_for_groups(own.prompts_per_step // own.parts)
                taken = self._take(own.prompts_per_step // own.parts)
                yield from self._train(sum(group.tokens for group in taken) * own.train_token_s)
            yield from self._publish()

    def _wait_for_groups(self, want: int) -> Iterator[simpy.Event]:
        began = self.env.now
        while not self._is_enough(want):
            self._changed = self.env.event()
            yield self._changed
        self._counts.wait_s += self.env.now - began
        self._record_span("wait", began)

    def _is_enough(self, want: int) -> bool:
        own = self.settings
        if own.order == "prompts" and own.over_sampling == 1.0 and own.parts == 1:
            return self._in_batch[self.version] >= want
        if len(self.ready) < want:
            return False
        if own.stale_groups != "wait" or own.order != "done":
            return True
        last = self.version - int(own.staleness)
        unfinished = sum(count for began, count in self._old.items() if began <= last)
        if not unfinished:
            return True
        done = sum(group.oldest <= last for group in self.ready)
        return done >= min(done + unfinished, want)

    def _take(self, want: int) -> list[Group]:
        """Return the groups of the step: those of its prompts, or the oldest finished ones."""
        own = self.settings
        if own.order == "prompts":
            self.ready.sort(key=lambda group: group.number // own.prompts_per_step)
        else:
            self.ready.sort(key=lambda group: group.oldest)
        taken, self.ready = self.ready[:want], self.ready[want:]
        for group in taken:
            self.trained.append(group.number)
            self.ages.append(self.version - group.oldest)
            self._counts.samples += len(group.lengths)
            self._counts.tokens += group.tokens
        self._counts.groups += len(taken)
        if own.over_sampling > 1.0 and own.staleness == 0:
            self._give_up([*self.ready, *self.open_groups.values()], retries=0)
        return taken

    def _train(self, seconds: float) -> Iterator[simpy.Event]:
        """Train; after a failure of ranks, repeat what no checkpoint has."""
        own = self.settings.failures
        while own is not None:
            until = self._failure_rng.expovariate(1 / own.trainer_mtbf_s)
            if until >= seconds:
                break
            self.failures += 1
            began = self.env.now
            yield self.env.timeout(until)
            self._record_span("train", began)
            began = self.env.now
            yield self.env.timeout(own.restart_s + sum(self._unsaved_s))
            self._record_span("replaced", began)
        began = self.env.now
        yield self.env.timeout(seconds)
        self._record_span("train", began)
        self._unsaved_s.append(seconds)
        if own is not None and len(self._unsaved_s) >= own.save_every * self.settings.parts:
            self._unsaved_s.clear()

    def _record_span(
        self, what: Literal["train", "wait", "publish", "replaced"], began: float
    ) -> None:
        if self.env.now > began:
            self.spans.append(Span(what=what, begin_s=began, end_s=self.env.now))

    def _publish(self) -> Iterator[simpy.Event]:
        own, began = self.settings, self.env.now
        self._drains = own.on_update == "drain"
        while self._drains and self._num_open:
            self._changed = self.env.event()
            yield self._changed
        self._publishes = True
        for engine in self.fleet.up():
            engine.pause()
        yield self.env.timeout(own.publish_s)
        self.version += 1
        self._publishes = self._drains = False
        self._give_up_old()
        for engine in self.fleet.up():
            engine.resume(self.version, restarts=own.on_update == "abort")
        self._begin_groups()
        self._record_span("publish", began)
        self.published_s.append(self.env.now)
        if len(self.published_s) == max(1, int(self.steps * WARM_SHARE)):
            self._first = self._current_counts()

    def _give_up_old(self) -> None:
        own = self.settings
        if own.order != "done" or own.stale_groups == "keep":
            return
        oldest = self.version - own.staleness
        old = [group for group in self.ready if group.oldest < oldest]
        old += [group for group in self.open_groups.values() if group.began < oldest]
        self._give_up(old, retries=0 if own.stale_groups == "drop" else MAX_RETRIES)

    def _give_up(self, groups: list[Group], *, retries: int) -> None:
        """Stop generating these groups. Each restarts at most `retries` times."""
        for group in groups:
            group.is_dead = True
            if group.number in self.open_groups:
                del self.open_groups[group.number]
                self._old[group.began] -= 1
                self._count_open(-group.unfinished)
            else:
                self._in_batch[group.number // self.settings.prompts_per_step] -= 1
        if not groups:
            return
        self.ready = [group for group in self.ready if not group.is_dead]
        self._stranded = [one for one in self._stranded if not one.group.is_dead]
        for engine in self.fleet.up():
            engine.remove()
        for group in groups:
            if group.retries < retries:
                self._begin(Group(group.number, group.lengths, retries=group.retries + 1))
            else:
                self.num_given_up += 1
                self.num_begun -= 1

    # ------------------------------------------------------------------ failures

    def _engines_fail(self, failures: Failures) -> Iterator[simpy.Event]:
        """Let engines fail: their requests go to other engines, and an engine returns with the
        weights of the others."""
        while True:
            rate = len(self.fleet.engines) / failures.engine_mtbf_s
            yield self.env.timeout(self._failure_rng.expovariate(rate))
            engine = self._failure_rng.choice(self.fleet.engines)
            if not engine.is_up:
                continue
            self.failures += 1
            for request in engine.fail():
                self._submit(request)
            self.fleet.flush()
            back = self.env.timeout(failures.restart_s, engine)
            back.callbacks.append(self._replaced)

    def _replaced(self, event: simpy.Event) -> None:
        engine: Engine = event.value
        engine.at, engine.is_up = self.env.now, True
        engine.version, engine.is_open = self.version, not self._publishes
        self.fleet.note(engine)
        stranded, self._stranded = self._stranded, []
        for request in stranded:
            self._submit(request)
        self.fleet.flush()

    # ------------------------------------------------------------------ figures

    def _current_counts(self) -> _Counts:
        self._count_open(0)
        for engine in self.fleet.engines:
            engine.settle()
        counts = self._counts
        counts.at_s = self.env.now
        counts.busy_s = sum(engine.busy_s for engine in self.fleet.engines)
        return _Counts(**{name: getattr(counts, name) for name in _Counts.__slots__})

    def _outcome(self) -> Outcome:
        first, last = self._first, self._current_counts()
        seconds = last.at_s - first.at_s
        ages = self.ages[first.groups :]
        return Outcome(
            step_s=seconds / (self.steps - max(1, int(self.steps * WARM_SHARE))),
            samples_per_s=(last.samples - first.samples) / seconds,
            tokens_per_s=(last.tokens - first.tokens) / seconds,
            engines_idle=1 - (last.busy_s - first.busy_s) / (self.settings.num_engines * seconds),
            rollout_idle=(last.closed_s - first.closed_s) / seconds,
            trainer_wait=(last.wait_s - first.wait_s) / seconds,
            staleness_mean=float(np.mean(ages)),
            staleness_max=max(ages),
            running_mean=(last.open_s - first.open_s) / seconds,
            given_up=self.num_given_up,
            failures=self.failures,
            num_events=sum(engine.num_events for engine in self.fleet.engines),
        )
