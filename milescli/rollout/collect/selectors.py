"""Defines the plug-ins that choose what is trained on, in the order in which a step calls them: a
curriculum chooses prompts, a filter keeps or refuses groups, a sample filter excludes samples, a
selection chooses groups if over-sampling began more, and shaping turns scores into training
rewards. Each has a protocol, a function that calls a plug-in and checks its answer, and the
built-in plug-ins. Called by the collector."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pvariance
from typing import Protocol

from milescli.core.errors import RecipeError
from milescli.core.role_views import has_role_rewards, rewards_by_role
from milescli.core.types import Group, Prompt, RewardDetail, Sample, StopReason
from milescli.core.user_code import plugin_fix
from milescli.recipe.data import Data
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards.scoring import finite_reward

NONE = "none"
"""Name of the curriculum that takes prompts in their order."""
FIRST = "first"
"""Name of the selection that only needs the groups that it takes, so that the others can be
cancelled."""


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Describes a prompt that the policy has answered."""

    reward: float
    """Mean reward of its samples, when it was sampled last."""
    times: int
    """How often it was sampled."""


class Curriculum(Protocol):
    """Defines a plug-in of `data.curriculum`."""

    def __call__(
        self,
        *,
        candidates: Sequence[Prompt],
        history: Mapping[int, PromptResult],
        count: int,
        settings: Data,
    ) -> Sequence[int]:
        """Return the places of the `count` candidates to sample now. `candidates`: the next prompts
        of the epoch, `data.curriculum_pool` times as many; `history`: results of earlier prompts,
        by `Prompt.index`."""
        ...


def choose_prompts(
    choose: Curriculum,
    candidates: Sequence[Prompt],
    history: Mapping[int, PromptResult],
    *,
    count: int,
    settings: Data,
) -> list[int]:
    """Call the curriculum. Return the places of the chosen candidates in ascending order. Raises
    RecipeError if the curriculum does not return `count` different places."""
    answer = choose(candidates=candidates, history=history, count=count, settings=settings)
    size = len(candidates)
    return sorted(checked_places(answer, "curriculum", settings.curriculum, size=size, count=count))


def record_rewards(history: dict[int, PromptResult], groups: Sequence[Group]) -> None:
    """Record the rewards of these groups, including refused ones."""
    for group in groups:
        index = group.prompt.index
        before = history[index].times if index in history else 0
        history[index] = PromptResult(fmean(group.rewards), before + 1)


def history_to_state(history: Mapping[int, PromptResult]) -> dict[str, list[float]]:
    """Turn the history into JSON for a checkpoint's manifest."""
    return {str(index): [result.reward, result.times] for index, result in history.items()}


def history_from_state(state: Mapping[str, Sequence[float]]) -> dict[int, PromptResult]:
    """Read a history that `history_to_state` made."""
    return {
        int(index): PromptResult(reward, int(times)) for index, (reward, times) in state.items()
    }


def in_order(
    *, candidates: Sequence[Prompt], history: Mapping[int, PromptResult], count: int, settings: Data
) -> Sequence[int]:
    """Take the prompts in their order."""
    return range(count)


def learnable(
    *, candidates: Sequence[Prompt], history: Mapping[int, PromptResult], count: int, settings: Data
) -> Sequence[int]:
    """Take the prompts with the largest p (1 - p), p: the share of right answers; this is the
    variance of a reward of 0 or 1 (learnability of Foster et al., arXiv 2502.12272). Untried
    prompts count as p = 1/2; of equal ones, the earlier is taken."""

    def learnability(place: int) -> float:
        result = history.get(candidates[place].index)
        share = 0.5 if result is None else min(max(result.reward, 0.0), 1.0)
        return share * (1.0 - share)

    return sorted(range(len(candidates)), key=lambda place: -learnability(place))[:count]


class GroupFilter(Protocol):
    """Defines a plug-in of `rollout.filter`. An attribute `needs_compared = True` requests a
    further argument `compared`: what the objective compares of rewards besides their sum."""

    def __call__(self, *, group: Group, settings: Rollout) -> bool:
        """Return True to keep the group. Called once per group, when all of its samples are
        scored."""
        ...


def is_kept(
    keep: GroupFilter,
    group: Group,
    *,
    settings: Rollout,
    compared: Collection[RewardDetail] = (),
) -> bool:
    """Call the filter and return its answer. Raises RecipeError if it is neither True nor False."""
    further = {"compared": compared} if getattr(keep, "needs_compared", False) else {}
    answer = keep(group=group, settings=settings, **further)
    return checked_bool(answer, "filter", settings.filter, of=f"prompt {group.prompt.index}")


def checked_bool(answer: object, kind: str, name: str, *, of: str) -> bool:
    """Return the answer of the filter `name` as a bool. Raises RecipeError if it is neither True
    nor False."""
    if answer in (True, False):
        return bool(answer)
    raise RecipeError(
        f"the {kind} `{name}` returned {answer!r}",
        why=f"expected for {of}: True to keep it, else False",
        fix=plugin_fix(name),
    )


def keep_all(*, group: Group, settings: Rollout) -> bool:
    """Keep every group."""
    return True


def zero_variance(
    *, group: Group, settings: Rollout, compared: Collection[RewardDetail] = ()
) -> bool:
    """Refuse groups whose rewards are all equal: their advantages are zero (dynamic sampling of
    DAPO, arXiv 2503.14476). `compared`: as in `has_zero_variance`."""
    return not has_zero_variance(group, compared)


zero_variance.needs_compared = True  # type: ignore[attr-defined]


def pass_rate(*, group: Group, settings: Rollout) -> bool:
    """Refuse groups whose mean reward is below `pass_rate_low` or above `pass_rate_high`: prompts
    that are too hard, or too easy, for the current policy."""
    return settings.pass_rate_low <= fmean(group.rewards) <= settings.pass_rate_high


def has_zero_variance(group: Group, compared: Collection[RewardDetail] = ()) -> bool:
    """Return True if all rewards of the group are equal, and those of each role. `compared`: also
    each part of the reward, or the rewards of turns."""
    rows: list[Sequence[object]] = [group.rewards]
    if has_role_rewards([group]):
        rows += rewards_by_role(group).values()
    if RewardDetail.PARTS in compared:
        names = {name for sample in group.samples for name in sample.reward_parts}
        rows += [[one.reward_parts.get(name, 0.0) for one in group.samples] for name in names]
    if RewardDetail.TURNS in compared:
        rows.append([_turn_rewards(sample) for sample in group.samples])
    return all(len(set(row)) <= 1 for row in rows)


def _turn_rewards(sample: Sample) -> tuple[tuple[float, ...], ...]:
    """Return the rewards of turns of each trajectory; empty if all are 0, whatever the number of
    turns."""
    rows = tuple(line.turn_rewards for line in sample.trajectories)
    return rows if any(map(any, rows)) else ()


class SampleFilter(Protocol):
    """Defines a plug-in of `rollout.sample_filter`."""

    def __call__(self, *, sample: Sample, settings: Rollout) -> bool:
        """Return True to train on the sample's tokens. Called once per sample, when its group is
        kept."""
        ...


def mark_learned_samples(keep: SampleFilter, group: Group, *, settings: Rollout) -> Group:
    """Mark the samples of the group as the filter decides. Raises RecipeError if its answer is
    neither True nor False."""
    name, of = settings.sample_filter, f"prompt {group.prompt.index}"
    kept = [
        checked_bool(keep(sample=sample, settings=settings), "sample filter", name, of=of)
        for sample in group.samples
    ]
    if all(kept):
        return group
    samples = [
        sample if is_kept else replace(sample, is_learned=False)
        for sample, is_kept in zip(group.samples, kept, strict=True)
    ]
    return replace(group, samples=samples)


def keep_sample(*, sample: Sample, settings: Rollout) -> bool:
    """Exclude no sample."""
    return True


def truncated(*, sample: Sample, settings: Rollout) -> bool:
    """Exclude responses that were truncated (overlong filtering of DAPO, arXiv 2503.14476)."""
    return sample.stop_reason is not StopReason.LENGTH


class Selection(Protocol):
    """Defines a plug-in of `rollout.selection`."""

    def __call__(self, *, groups: Sequence[Group], count: int, settings: Rollout) -> Sequence[int]:
        """Return the places of the `count` groups to train on. `groups`: those that the filter
        kept, more than `count`, in the order of their prompts."""
        ...


def select_groups(
    choose: Selection, groups: Sequence[Group], *, count: int, settings: Rollout
) -> list[Group]:
    """Return the chosen groups in the order of their prompts; all if there are no more than
    `count`. Raises RecipeError."""
    if len(groups) <= count:
        return list(groups)
    answer = choose(groups=groups, count=count, settings=settings)
    places = checked_places(answer, "selection", settings.selection, size=len(groups), count=count)
    return [groups[place] for place in sorted(places)]


def checked_places(answer: object, kind: str, name: str, *, size: int, count: int) -> list[int]:
    """Return `count` different places of a list of `size`, as a plug-in chose them. Raises
    RecipeError for any other answer."""
    try:
        places = [int(place) for place in answer]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        places = []
    if len(set(places)) == count == len(places) and all(0 <= place < size for place in places):
        return places
    raise RecipeError(
        f"the {kind} `{name}` returned {answer!r:.200}",
        why=f"it must choose {count} of {size}: different whole numbers from 0 to {size - 1}",
        fix=plugin_fix(name),
    )


def first(*, groups: Sequence[Group], count: int, settings: Rollout) -> Sequence[int]:
    """Take the groups that finish first in a run; the first ones of a list."""
    return range(count)


def variance(*, groups: Sequence[Group], count: int, settings: Rollout) -> Sequence[int]:
    """Take the groups whose rewards differ most; of equal ones, the earlier. The gradient of a
    group grows with the spread of its rewards."""
    return sorted(range(len(groups)), key=lambda place: -pvariance(groups[place].rewards))[:count]


class Shaping(Protocol):
    """Defines a plug-in of `rollout.shaping`."""

    def __call__(self, *, group: Group, settings: Rollout) -> Sequence[float]:
        """Return [samples] the rewards of a group's samples, in their order."""
        ...


def shape_rewards(shaping: Shaping, group: Group, *, settings: Rollout) -> Group:
    """Return the group with its rewards shaped. Raises RecipeError unless each sample gets a finite
    number."""
    rewards = shaping(group=group, settings=settings)
    try:
        numbers = [finite_reward(reward) for reward in rewards]
    except (TypeError, ValueError) as error:
        raise _unusable_rewards(group, settings, str(error)) from error
    if len(numbers) != len(group.samples):
        why = f"{len(numbers)} rewards for {len(group.samples)} samples"
        raise _unusable_rewards(group, settings, why)
    if numbers == group.rewards:
        return group
    samples = [
        replace(sample, reward=reward)
        for sample, reward in zip(group.samples, numbers, strict=True)
    ]
    return replace(group, samples=samples)


def unchanged(*, group: Group, settings: Rollout) -> Sequence[float]:
    """Return the rewards unchanged."""
    return group.rewards


def overlong(*, group: Group, settings: Rollout) -> Sequence[float]:
    """Return each reward plus `overlong_penalty` x min(0, max(-1, (L - B - n) / B)); n: trained
    tokens of the sample; L: `max_response_tokens`; B: `overlong_buffer` (soft overlong punishment
    of DAPO, arXiv 2503.14476, eq. 13)."""
    longest = settings.max_response_tokens
    buffer = settings.overlong_buffer or max(longest // 5, 1)
    return [
        reward
        + settings.overlong_penalty
        * min(0.0, max(-1.0, (longest - buffer - sample.num_loss_tokens) / buffer))
        for sample, reward in zip(group.samples, group.rewards, strict=True)
    ]


def _unusable_rewards(group: Group, settings: Rollout, why: str) -> RecipeError:
    return RecipeError(
        f"the shaping `{settings.shaping}` returned rewards that cannot be trained on",
        why=f"for the group of prompt {group.prompt.index}: {why}",
        fix=plugin_fix(settings.shaping, "it returns one finite number for each sample"),
    )
