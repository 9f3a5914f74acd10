"""Represents groups whose tokens stay in the process that collected them. That process sends their
numbers (`GroupNumbers`), and the driver makes groups without tokens from these for ordering,
filters, statistics and packing. `runtime.collecting` moves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from milescli.core.types import (
    NO_GUESSES,
    Group,
    Guesses,
    Prompt,
    Sample,
    StopReason,
    VersionSpan,
    WeightVersion,
)


class TrajectoryStub(NamedTuple):
    """Stands in for a Trajectory whose tokens are in another process; fields have the same
    names."""

    num_tokens: int
    num_loss_tokens: int
    version_spans: list[VersionSpan]
    """One span per weight version; their positions have no meaning."""
    role: str | None = None
    rewards: tuple[float, ...] | None = None
    """[turns], unlike a Trajectory's; None if only the sample's reward is known."""

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Return the reward of each turn, in order; empty if only the sample's is known."""
        return self.rewards or ()


@dataclass(slots=True)
class SampleStub:
    """Stands in for a Sample whose tokens are in another process; fields have the same names. It is
    not frozen: a step makes tens of thousands, and frozen ones take five times as long to
    create."""

    sample_index: int
    seed: int
    trajectories: list[TrajectoryStub]
    stop_reason: StopReason
    reward: float
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    guesses: Guesses = NO_GUESSES
    num_failed: int = 0
    is_learned: bool = True
    text: str = ""
    role_rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_loss_tokens(self) -> int:
        """Return the number of tokens that the policy sampled, over all trajectories."""
        lines = self.trajectories
        return lines[0][1] if len(lines) == 1 else sum([line[1] for line in lines])

    @property
    def oldest_version(self) -> WeightVersion:
        """Return the version of the oldest token."""
        return min(span.version for line in self.trajectories for span in line.version_spans)


_STOPS = tuple(StopReason)
_RARE = ("reward_parts", "role_rewards", "figures", "guesses", "num_failed")
"""Fields of a sample that most samples leave as they are."""
_USUAL = {
    each.name: {} if each.default is MISSING else each.default
    for each in fields(Sample)
    if each.name in _RARE
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNumbers:
    """Holds the numbers of some groups in arrays, so that no object per sample is sent. G: groups;
    N: samples of all of them, group by group; L: their trajectories, sample by sample."""

    tickets: np.ndarray
    """[G] int64 ticket of the order for the group."""
    num_samples: np.ndarray
    """[G] int32"""
    greedy_rewards: list[float | None]
    """[G]"""
    indices: np.ndarray
    """[N] int32 place among the samples of the prompt; those that could not be scored are
    missing."""
    seeds: np.ndarray
    """[N] int64"""
    rewards: np.ndarray
    """[N] float64"""
    stops: np.ndarray
    """[N] uint8 index of the stop reason in StopReason."""
    num_lines: np.ndarray
    """[N] int32 trajectories of the sample."""
    num_tokens: np.ndarray
    """[L] int32 tokens of the trajectory, prompt included."""
    num_loss_tokens: np.ndarray
    """[L] int32"""
    versions: np.ndarray
    """[L, 2] int64 weight versions of the oldest and of the newest token."""
    roles: Sequence[str | None]
    """The different roles of all trajectories."""
    marks: np.ndarray
    """[L, 2] int32 index in `roles`, and number of rewards of turns, -1 if the trajectory has none;
    empty if no trajectory has a role or rewards of turns."""
    turn_rewards: np.ndarray
    """[turns of all trajectories with rewards of turns] float64"""
    rare: Mapping[int, Mapping[str, Any]]
    """Index of a sample -> its fields that differ from their defaults."""

    @classmethod
    def of(cls, groups: Mapping[int, Group]) -> GroupNumbers:
        """Return the numbers of groups, which are given by ticket."""
        samples = [sample for group in groups.values() for sample in group.samples]
        lines = [line for sample in samples for line in sample.trajectories]
        roles = list(dict.fromkeys(line.role for line in lines))
        places = {role: place for place, role in enumerate(roles)}
        is_marked = roles != [None] or any(line.rewards is not None for line in lines)
        of_turns = [None if line.rewards is None else line.turn_rewards for line in lines]
        marks = [
            (places[line.role], -1 if row is None else len(row))
            for line, row in zip(lines, of_turns, strict=True)
            if is_marked
        ]
        versions = [[span.version for span in line.version_spans] for line in lines]
        rare = {
            place: own
            for place, sample in enumerate(samples)
            if (own := {name: x for name in _RARE if (x := getattr(sample, name)) != _USUAL[name]})
        }
        return cls(
            tickets=np.fromiter(groups, np.int64),
            num_samples=np.array([len(group.samples) for group in groups.values()], np.int32),
            greedy_rewards=[group.greedy_reward for group in groups.values()],
            indices=np.array([sample.sample_index for sample in samples], np.int32),
            seeds=np.array([sample.seed for sample in samples], np.int64),
            rewards=np.array([sample.reward for sample in samples], np.float64),
            stops=np.array([_STOPS.index(sample.stop_reason) for sample in samples], np.uint8),
            num_lines=np.array([len(sample.trajectories) for sample in samples], np.int32),
            num_tokens=np.array([line.num_tokens for line in lines], np.int32),
            num_loss_tokens=np.array([line.num_loss_tokens for line in lines], np.int32),
            versions=np.array([(min(each), max(each)) for each in versions], np.int64),
            roles=roles,
            marks=np.array(marks, np.int32),
            turn_rewards=np.array([x for row in of_turns for x in row or ()], np.float64),
            rare=rare,
        )

    def groups(self, of: Mapping[int, tuple[int, Prompt]]) -> dict[int, Group]:
        """Return the groups without their tokens, by ticket. `of`: (epoch, prompt) by ticket."""
        spans: dict[tuple[int, int], list[VersionSpan]] = {}
        samples = list[SampleStub]()
        starts = [0, *accumulate(self.num_samples.tolist())]
        sizes = zip(
            self.num_tokens.tolist(),
            self.num_loss_tokens.tolist(),
            map(tuple, self.versions.tolist()),
            strict=True,
        )
        marks, names = iter(self.marks.tolist()), self.roles
        of_turns = iter(self.turn_rewards.tolist())
        is_marked = self.marks.size > 0
        columns = (self.indices, self.seeds, self.rewards, self.stops, self.num_lines)
        for index, seed, reward, stop, count in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            lines = list[TrajectoryStub]()
            for _ in range(count):
                size, trained, seen = next(sizes)
                own = spans.get(seen)
                if own is None:
                    own = spans[seen] = [
                        VersionSpan(start=0, end=0, version=each) for each in dict.fromkeys(seen)
                    ]
                if is_marked:
                    role, num_turns = next(marks)
                    rewards = None if num_turns < 0 else (*islice(of_turns, num_turns),)
                    lines.append(TrajectoryStub(size, trained, own, names[role], rewards))
                else:
                    lines.append(TrajectoryStub(size, trained, own))
            samples.append(SampleStub(index, seed, lines, _STOPS[stop], reward))
        for place, unusual in self.rare.items():
            for name, value in unusual.items():
                setattr(samples[place], name, value)
        return {
            ticket: Group(
                prompt=of[ticket][1],
                samples=cast("list[Sample]", samples[start:end]),
                epoch=of[ticket][0],
                greedy_reward=greedy,
            )
            for ticket, greedy, (start, end) in zip(
                self.tickets.tolist(), self.greedy_rewards, pairwise(starts), strict=True
            )
        }


def with_decisions(group: Group, decided: Group) -> Group:
    """Return the group with the driver's decisions: shaped rewards, and which samples are trained
    on."""
    samples = [
        replace(sample, reward=other.reward, is_learned=other.is_learned)
        for sample, other in zip(group.samples, decided.samples, strict=True)
    ]
    return replace(group, samples=samples)
