"""A run with a journal, over its attempts, for `test_sample_journal`. The engine is in memory: what
it says depends on the seed and on the weights, and the weights on all that was trained on, and on
the identity's `line`."""

from __future__ import annotations

import asyncio
import hashlib
import random
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from milescli.checkpoint.journal import intact_records
from milescli.core.types import Group, StopReason, VersionSpan, WeightVersion
from milescli.rollout.base import Completion, GenerateRequest
from milescli.rollout.collect.collector import sampling_seed
from milescli.rollout.collect.prefetching import open_collector
from milescli.runtime.recording.sample_journal import Identity, OldestCheckpoint, SampleJournal
from milescli.runtime.saving import version_of
from tests.rollout.engines import ScriptedEngine, make_episodes, make_recipe, make_source

STEPS, EVERY, KEEP = 8, 2, 2
WRITTEN_S = 300.0
"""For all to be on the disk, also where others keep it busy."""
SAME = Identity(past="p", line="l")


def said(seed: int, weights: str) -> tuple[int, float]:
    """A token and its log-prob."""
    digest = hashlib.blake2b(f"{seed} {weights}".encode(), digest_size=4).digest()
    return digest[0] % 2, -digest[1] / 8.0


class Engine(ScriptedEngine):
    """Dies at the `dies_at`th response."""

    def __init__(self, rng: random.Random, dies_at: int | None) -> None:
        super().__init__(delay=lambda _: rng.randrange(12))
        self.weights = ""
        self.dies_at, self.died = dies_at, asyncio.Event()
        self.num_said = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        weights, version = self.weights, self.version
        await super().generate(request)
        self.num_said += 1
        if self.num_said == self.dies_at:
            self.died.set()
        token, logprob = said(request.seed or 0, weights)
        return Completion(
            response_ids=[token],
            logprobs=array("f", [logprob]),
            stop_reason=StopReason.STOP,
            version_spans=[VersionSpan(start=0, end=1, version=version)],
        )


@dataclass
class Saved:
    """A checkpoint."""

    step: int
    weights: str
    position: int
    past: dict[int, str] = field(default_factory=dict)
    """Weights by version, of all before it."""
    taken: list[int] = field(default_factory=list)
    """Behind the position."""


@dataclass
class Done:
    """What became of one attempt."""

    trained: dict[int, list] = field(default_factory=dict)
    """Step -> the prompt, tokens, log-probs, seeds and versions of each group, in order."""
    weights: dict[int, str] = field(default_factory=dict)
    """By version, those of its past too."""
    seeds: set[int] = field(default_factory=set)
    """That the engine was asked for."""
    note: str | None = None


@dataclass
class Rig:
    """A run, over its attempts."""

    folder: Path
    rng: random.Random
    rollout: dict
    saved: list[Saved] = field(default_factory=lambda: [Saved(0, "", 0)])
    identity: Identity = SAME
    bound_bytes: float = 1e9
    warned: list[str] = field(default_factory=list)

    def journal(self) -> SampleJournal:
        return SampleJournal(
            self.folder,
            identity=self.identity,
            bound_bytes=self.bound_bytes,
            max_staleness=self.rollout.get("max_staleness", 0),
            oldest_kept=lambda: OldestCheckpoint(
                step=self.saved[0].step, position=self.saved[0].position
            ),
            warn=self.warned.append,
        )

    def attempt(self, *, dies_at: int | None = None, is_new: bool = False) -> Done:
        return asyncio.run(self._attempt(Done(), dies_at=dies_at, is_new=is_new))

    async def _attempt(self, done: Done, *, dies_at: int | None, is_new: bool) -> Done:
        start, journal, engine = self.saved[-1], self.journal(), Engine(self.rng, dies_at)
        if is_new:
            journal.begin()
        else:
            done.note = journal.load(
                step=start.step,
                version=version_of(start.step),
                position=start.position,
                taken=start.taken,
            )
        run = asyncio.ensure_future(self.run(done, start, journal, engine))
        death = asyncio.ensure_future(engine.died.wait())
        await asyncio.wait([run, death], return_when=asyncio.FIRST_COMPLETED)
        run.cancel()
        death.cancel()
        await asyncio.gather(run, death, return_exceptions=True)
        if run.done() and not run.cancelled():
            run.result()
        journal.close(WRITTEN_S)
        done.seeds = {request.seed for request in engine.requests}  # type: ignore[misc]
        return done

    async def run(self, done: Done, start: Saved, journal: SampleJournal, engine: Engine) -> None:
        source = make_source()
        source.seek(start.position)
        collector = open_collector(
            source,
            make_episodes(engine),
            recipe=make_recipe(**self.rollout),
            journal=journal,
            taken=start.taken,
        )
        weights, version = start.weights, version_of(start.step)
        done.weights |= start.past
        engine.weights, engine.version, done.weights[version] = weights, version, weights
        collector.start(version=version, first_step=start.step + 1, last_step=STEPS)
        try:
            for step in range(start.step + 1, STEPS + 1):
                groups = await collector.take(step, version=version)
                done.trained[step] = [_plain(group) for group in groups]
                trained = f"{weights}{done.trained[step]}{self.identity.line}"
                weights = hashlib.sha256(trained.encode()).hexdigest()
                for _ in range(self.rng.randrange(30)):
                    await asyncio.sleep(0)
                if step % EVERY == 0:
                    self.saved = [
                        *self.saved,
                        Saved(
                            step,
                            weights,
                            collector.position,
                            dict(done.weights),
                            collector.taken,
                        ),
                    ]
                    self.saved = self.saved[-KEEP:]
                    journal.checkpoint()
                version = WeightVersion(version + 1)
                engine.weights, engine.version, done.weights[version] = weights, version, weights
                collector.on_published(version)
        finally:
            await collector.stop()

    def tear(self) -> None:
        """What a kill takes away of the newest file."""
        if files := sorted(self.folder.glob("*.journal")):
            size = files[-1].stat().st_size
            with files[-1].open("r+b") as file:
                file.truncate(self.rng.randrange(size // 2, size + 1))

    def held(self) -> dict[int, int]:
        """Position -> newest version, of what the journal has."""
        heads = [head for file in self.folder.glob("*.journal") for _, head in intact_records(file)]
        return {head["position"]: head["newest"] for head in heads if head["kind"] == "group"}


def _plain(group: Group) -> tuple:
    return group.prompt.index, [
        (
            sample.seed,
            sample.response_ids,
            sample.trajectories[0].logprobs[-1],
            [span.version for span in sample.version_spans],
        )
        for sample in group.samples
    ]


def seeds_of(position: int) -> set[int]:
    return {sampling_seed(0, position, index) for index in range(3)}
