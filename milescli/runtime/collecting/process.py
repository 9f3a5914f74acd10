"""Collects the groups of its share of prompts, in a process of its own: plays episodes, scores
them, writes them to its part of the journal, and keeps their tokens until a step is trained on
them. The driver (`collectors`) makes all other decisions from numbers. An actor hosts it; its
methods run on the actor's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from milescli.agents.foreign.host import close_hosts
from milescli.agents.mcp_tools import close_servers
from milescli.backends.ray.actor import ActorHandle
from milescli.backends.ray.cluster import Cluster
from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.client.http import EngineDied
from milescli.checkpoint.journal import RecordLocation
from milescli.core.concurrency import in_thread
from milescli.core.errors import MilesError
from milescli.core.events import PublishStats
from milescli.core.imports import Origin, run_gc_rarely
from milescli.core.types import EngineAddress, Group, Prompt, WeightVersion
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.schema import Recipe
from milescli.rollout.base import PromptSource, RolloutEngine
from milescli.rollout.collect.collector import Collector, Progress
from milescli.rollout.collect.group_record import GroupHead
from milescli.rollout.collect.remote_groups import GroupNumbers, with_decisions
from milescli.rollout.episode.episode import training_episodes
from milescli.runtime.collecting.followers import FollowedScorer
from milescli.runtime.collecting.share import Share, shared_recipe
from milescli.runtime.inputs.auxiliary_models import policies_by_role, served_teachers
from milescli.runtime.inputs.environment_nodes import SpreadEnvironments, spread_environments
from milescli.runtime.inputs.episode_parts import FirstWarnings, chat_form_of, scorer_of
from milescli.runtime.recording.sample_journal import Identity, OldestCheckpoint, SampleJournal
from milescli.runtime.recovery.engines import ScoreClient
from milescli.train.advantages import Advantage
from milescli.train.base import ShardPiece, TrainSequence
from milescli.train.objectives import load_objective
from milescli.train.objectives.policy import Policy
from milescli.train.packing import images_of
from milescli.workers.isolated import close_lanes

GATHER_S, MOST_GATHER_S, GATHER_OF_A_GROUP_S = 0.05, 0.5, 0.0005
"""Groups that finish within this time are reported together: GATHER_S plus GATHER_OF_A_GROUP_S for
each unfinished group, at most MOST_GATHER_S. So the last groups of a step do not wait, while a
thousand cost the driver few reports."""
REPORT_EVERY_S = 5.0
"""Longest that a call waits before it returns an empty report."""


_PROMPT = tuple(field.name for field in fields(Prompt))
as_row = attrgetter(*_PROMPT)
"""Returns the fields of a prompt as a tuple: sending an object takes ten times as long."""


class GroupOrder(NamedTuple):
    """Requests the group of one prompt. Sent as a plain tuple."""

    ticket: int
    """Number of the order; all later messages name the group by it."""
    position: int
    epoch: int
    prompt: tuple[Any, ...]
    """See `as_row`."""
    step: int
    recorded: tuple[GroupHead, RecordLocation] | None = None
    """Where the group is in a journal; None: it must be sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorReport:
    """Reports what finished since the last report."""

    numbers: GroupNumbers | None
    errors: Mapping[int, BaseException]
    """Ticket -> error."""
    unscored: Sequence[int]
    """Tickets of groups with too few samples that could be scored."""
    warnings: Sequence[str]
    engines: Mapping[str, tuple[int, float]]
    """URL -> (number of open requests, seconds since the engine last replied)."""
    lost_records: int
    """Number of journal records that could not be read."""


class GroupSequences(NamedTuple):
    """Says how to make the sequences of one group."""

    ticket: int
    number: int
    """Number of the group in the step."""
    first: int
    """Number of its first sequence."""
    advantages: Sequence[Advantage] | None
    """[samples] None: estimated from the group's tokens and `rewards`."""
    rewards: Sequence[float]
    """[samples] as the driver shaped them; empty if there are advantages."""
    learned: Sequence[bool]
    """[samples] True if the sample is trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOrder:
    """Requests the sequences of the groups that a step is trained on."""

    state: Mapping[str, float]
    """State of the objective, if it changes from step to step."""
    groups: Sequence[GroupSequences]
    has_turn_rewards: bool
    """True if samples of the step have rewards of single turns, which the credit function gets."""
    ranks: Sequence[np.ndarray]
    """[dp] numbers of the sequences that each data-parallel rank gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPart:
    """Describes where a process writes its part of the journal; see `SampleJournal`."""

    folder: Path
    identity: Identity
    bound_bytes: float


class CollectorProcess:
    """Collects groups; one of a run's collecting processes."""

    def __init__(
        self,
        *,
        name: str,
        recipe: Recipe,
        share: Share,
        origin: Origin,
        cluster: Cluster,
        tokenizer: ChatTokenizer,
        vocab_size: int,
        fleet: Mapping[str, Any],
        policies: Mapping[str, Mapping[str, Any]],
        version: WeightVersion,
        is_paused: bool,
        with_greedy: bool,
        journal: JournalPart | None,
    ) -> None:
        """Set up the process. `name`: of this process; `share`: its part of the run's resources.
        `fleet`: arguments of SglangFleet; `policies`: those of each policy that plays a role;
        `version`: of the engines' weights. `is_paused`: True if a weight update is in progress."""
        origin.adopt()
        self._name, self._share, self._cluster = name, share, cluster
        self._recipe = recipe = shared_recipe(recipe, share)
        self._fleet = SglangFleet(**fleet)
        self._fleet.reopen(version)
        self._policies = {name: SglangFleet(**served) for name, served in policies.items()}
        for own in (self._fleet, *self._policies.values()):
            own.on_death = lambda _: None  # the driver's fleet finds it, too, and replaces it
        self._scorer = FollowedScorer(cluster, recipe.machine)
        self._warnings, self._lost = list[str](), 0
        self._journal: SampleJournal | None = None
        if journal is not None:
            self._journal = SampleJournal(
                journal.folder,
                identity=journal.identity,
                bound_bytes=journal.bound_bytes,
                max_staleness=recipe.rollout.max_staleness,
                oldest_kept=lambda: self._oldest,
                warn=self._warnings.append,
            )
        self._oldest: OldestCheckpoint | None = None
        episodes = training_episodes(
            recipe,
            engine=self.engine,
            scorer=scorer_of(recipe, ScoreClient(self._scorer)),
            decode=tokenizer.decode_response,
            vocab_size=vocab_size,
            chat_form=chat_form_of(recipe, tokenizer),
            teachers=served_teachers(recipe, tokenizer),
            policies=policies_by_role(recipe, self._policies),
            tell=FirstWarnings(self._warnings.append),
        )
        self._collector = Collector(
            cast("PromptSource", None),  # the driver draws
            episodes,
            recipe=recipe,
            with_greedy=with_greedy,
            journal=self._journal,
        )
        self._objective = cast("Policy", load_objective(recipe.train.objective, recipe))
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """By ticket, groups in the making."""
        self._groups: dict[int, Group] = {}
        """By ticket, those that no step has taken."""
        self._done: dict[int, Group] = {}
        """By ticket, those that are not reported yet."""
        self._errors: dict[int, BaseException] = {}
        self._unscored = list[int]()
        self._news, self._made = asyncio.Event(), asyncio.Event()
        self._starts_paused = is_paused
        self._environments: SpreadEnvironments | None = None

    @property
    def engine(self) -> RolloutEngine:
        """Return the engine that samples; benchmarks override it."""
        return self._fleet

    async def open(self) -> None:
        """Start on the event loop of the calls. Raises WorkerDied or WaitTimeout if a node cannot
        host environments."""
        run_gc_rarely()
        self._environments = await spread_environments(
            self._recipe,
            self._cluster,
            self._share.other_nodes,
            tell=self._warnings.append,
            name=f"environments of {self._name}",
        )
        if self._starts_paused:
            await self._fleet.stop_requests()

    async def take(
        self, orders: Sequence[tuple[Any, ...]], cancelled: Sequence[int], released: Sequence[int]
    ) -> None:
        """Start some groups (`GroupOrder`), cancel others, and drop those that were released."""
        for ticket in (*cancelled, *released):
            if (task := self._tasks.pop(ticket, None)) is not None:
                task.cancel()
            self._groups.pop(ticket, None)
            self._done.pop(ticket, None)
        for order in map(GroupOrder._make, orders):
            self._tasks[order.ticket] = asyncio.create_task(
                self._make(order), name=f"prompt-{order.position}"
            )

    async def _make(self, order: GroupOrder) -> None:
        ticket, position = order.ticket, order.position
        try:
            if self._journal is not None and order.recorded is not None:
                self._journal.adopt(position, *order.recorded)
            progress = Progress(step=order.step)
            prompt = Prompt(**dict(zip(_PROMPT, order.prompt, strict=True)))
            group = await self._collector.group(order.epoch, prompt, position, progress)
            if self._tasks.pop(ticket, None) is None:
                return
            if group is None:
                self._unscored.append(ticket)
            else:
                self._groups[ticket] = self._done[ticket] = group
                self._made.set()
        except Exception as error:  # whatever it is, the driver raises it
            self._tasks.pop(ticket, None)
            self._errors[ticket] = error if isinstance(error, MilesError) else _plain(error)
        self._news.set()

    async def report(self) -> CollectorReport:
        """Wait until something has finished, and report it."""
        try:
            async with asyncio.timeout(REPORT_EVERY_S):
                await self._news.wait()
            longer = GATHER_S + GATHER_OF_A_GROUP_S * len(self._tasks)
            await asyncio.sleep(min(longer, MOST_GATHER_S))
        except TimeoutError:
            pass
        self._news.clear()
        done, self._done = self._done, {}
        if done and (journal := self._journal) is not None:
            # what the driver counts on must outlive this process
            await in_thread(journal.wait_written)
        errors, warnings, unscored = self._errors, list(self._warnings), self._unscored
        self._errors, self._unscored = {}, []
        self._warnings.clear()
        lost, self._lost = self._lost, self._journal.num_lost if self._journal is not None else 0
        return CollectorReport(
            numbers=GroupNumbers.of(done) if done else None,
            errors=errors,
            unscored=unscored,
            warnings=warnings,
            engines={
                each.url: (fleet.num_waiting(each.url), fleet.silent_s(each.url))
                for fleet in (self._fleet, *self._policies.values())
                for each in fleet.engines
            },
            lost_records=self._lost - lost,
        )

    async def made(self, tickets: Sequence[int]) -> None:
        """Wait until these groups are complete; their orders may still be on the way."""
        while not all(ticket in self._groups for ticket in tickets):
            self._made.clear()
            await self._made.wait()

    async def make_pieces(self, order: SequenceOrder) -> tuple[Any, ...]:
        """Return (None, [dp] the pieces that each rank gets of the groups that this process
        has)."""
        return None, *(await in_thread(lambda: self._pieces(order)))

    def _pieces(self, order: SequenceOrder) -> list[ShardPiece]:
        self._objective.restore(order.state)
        made = dict[int, TrainSequence]()
        for one in map(GroupSequences._make, order.groups):
            group, row = self._decided(one), one.advantages
            if row is None:
                (row,) = self._objective.advantages([group])
            own = self._objective.of_group(
                group, row, number=one.number, has_turn_rewards=order.has_turn_rewards
            )
            made |= dict(enumerate(own, start=one.first))
        png = images_of(self._groups[ticket] for ticket, *_ in order.groups)
        pieces = list[ShardPiece]()
        for numbers in order.ranks:
            own = {number: made[number] for number in numbers.tolist() if number in made}
            shown = {span.sha256 for each in own.values() for span in each.image_spans}
            pieces.append(ShardPiece(own, {image: png[image] for image in shown}))
        return pieces

    def _decided(self, decided: GroupSequences) -> Group:
        """Return the group with the driver's decisions: trained samples, and rewards."""
        group = self._groups[decided.ticket]
        samples = [
            sample if is_learned else replace(sample, is_learned=False)
            for sample, is_learned in zip(group.samples, decided.learned, strict=True)
        ]
        if decided.advantages is None:
            pairs = zip(samples, decided.rewards, strict=True)
            samples = [replace(sample, reward=reward) for sample, reward in pairs]
        return replace(group, samples=samples)

    async def whole(self, decided: Mapping[int, Group]) -> dict[int, Group]:
        """Return groups with their tokens, by ticket; rewards are those that the driver decided."""
        return {
            ticket: with_decisions(self._groups[ticket], group) for ticket, group in decided.items()
        }

    async def pause(self) -> PublishStats:
        """Pause its own requests, as `SglangFleet.pause` does; the driver pauses the engines."""
        return await self._fleet.stop_requests()

    async def reopen(self, version: WeightVersion) -> None:
        """Let its requests continue."""
        self._fleet.reopen(version)

    async def pause_some(self, urls: frozenset[str]) -> PublishStats:
        """Pause its requests to some engines, as `SglangFleet.pause_some`; the driver pauses
        them."""
        return await self._fleet.stop_some(urls)

    async def reopen_some(self, urls: frozenset[str]) -> None:
        """Send to these engines again."""
        await self._fleet.reopen_some(urls)

    async def use(self, engines: Sequence[EngineAddress], policy: str | None) -> None:
        """Send requests to these engines from now on: those of a policy that plays a role, or, if
        `policy` is None, those of the trained policy."""
        fleet = self._fleet if policy is None else self._policies[policy]
        urls, own = {each.url for each in engines}, {each.url for each in fleet.engines}
        for gone in own - urls:
            error = EngineDied(f"{gone} is not used any more", why="it was replaced", fix=[])
            error.url = gone
            fleet.remove(error)
        for engine in engines:
            if engine.url not in own:
                fleet.add(engine)

    async def use_scorer(self, process: ActorHandle) -> None:
        """Use this process of the reward model from now on."""
        self._scorer.follow(process)

    async def distrust(self) -> None:
        """Ignore all recorded samples: see `SampleJournal.distrust`."""
        if self._journal is not None:
            self._journal.distrust()

    async def checkpoint(self, oldest: OldestCheckpoint | None) -> None:
        """Begin the next file of the journal; `oldest`: from which a run may be resumed."""
        self._oldest = oldest
        if self._journal is not None:
            self._journal.checkpoint()

    async def close(self) -> None:
        """Cancel the running episodes, and write the queued journal records."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._environments is not None:
            self._environments.end()
        for fleet in (self._fleet, *self._policies.values()):
            await fleet.close()
        for end in (close_lanes, close_servers, close_hosts):
            await in_thread(end)
        if (journal := self._journal) is not None:
            await in_thread(journal.close)


def _plain(error: BaseException) -> RuntimeError:
    """Convert an error to one that any process can unpickle."""
    return RuntimeError(f"{type(error).__name__}: {error}")
