"""Which prompts come next. `data.curriculum` names a way to choose among candidates by what the
policy made of them before: built in here, an entry point, or an import path. What it knows is kept
in each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol, cast

from milescli.core.registry import Registry
from milescli.core.types import Group, Prompt
from milescli.recipe.data import Data
from milescli.rollout.collect.selection import places_of
from milescli.workers.isolated import resolve_isolated

NONE = "none"


@dataclass(frozen=True, slots=True)
class Tried:
    """A prompt that the policy has answered."""

    reward: float
    """Mean of its samples' rewards, when it was sampled last."""
    times: int
    """How often it was sampled."""


class Curriculum(Protocol):
    """A plug-in of `data.curriculum`."""

    def __call__(
        self,
        *,
        candidates: Sequence[Prompt],
        history: Mapping[int, Tried],
        count: int,
        settings: Data,
    ) -> Sequence[int]:
        """Places of the `count` candidates to sample now. `candidates`: the next prompts of the
        epoch, `data.curriculum_pool` times as many; `history`: by `Prompt.index`, of those tried
        before."""
        ...


CURRICULA = Registry(
    "curriculum",
    {
        NONE: "milescli.rollout.collect.curriculum:in_order",
        "learnable": "milescli.rollout.collect.curriculum:learnable",
    },
    signature=("candidates", "history", "count", "settings"),
)


def load_curriculum(name: str) -> Curriculum:
    """Raises RecipeError where `data.curriculum` names nothing that fits."""
    return cast(Curriculum, resolve_isolated(CURRICULA, name, key="data.curriculum"))


def chosen(
    choose: Curriculum,
    candidates: Sequence[Prompt],
    history: Mapping[int, Tried],
    *,
    count: int,
    settings: Data,
) -> list[int]:
    """Places, in the order of the candidates. Raises RecipeError where what it says is none."""
    said = choose(candidates=candidates, history=history, count=count, settings=settings)
    size = len(candidates)
    return sorted(places_of(said, "curriculum", settings.curriculum, size=size, count=count))


def remember(history: dict[int, Tried], groups: Sequence[Group]) -> None:
    """What came of these groups, refused ones among them."""
    for group in groups:
        index = group.prompt.index
        before = history[index].times if index in history else 0
        history[index] = Tried(fmean(group.rewards), before + 1)


def as_state(history: Mapping[int, Tried]) -> dict[str, list[float]]:
    """For a checkpoint's manifest."""
    return {str(index): [tried.reward, tried.times] for index, tried in history.items()}


def from_state(state: Mapping[str, Sequence[float]]) -> dict[int, Tried]:
    """See `as_state`."""
    return {int(index): Tried(reward, int(times)) for index, (reward, times) in state.items()}


def in_order(
    *, candidates: Sequence[Prompt], history: Mapping[int, Tried], count: int, settings: Data
) -> Sequence[int]:
    """As they come."""
    return range(count)


def learnable(
    *, candidates: Sequence[Prompt], history: Mapping[int, Tried], count: int, settings: Data
) -> Sequence[int]:
    """The largest p (1 - p), p: the share of right answers, the variance of a reward of 0 or 1
    (learnability of Foster et al., arXiv 2502.12272). What was not tried counts as p = 1/2; of
    equal ones, the earlier."""

    def learnability(place: int) -> float:
        tried = history.get(candidates[place].index)
        share = 0.5 if tried is None else min(max(tried.reward, 0.0), 1.0)
        return share * (1.0 - share)

    return sorted(range(len(candidates)), key=lambda place: -learnability(place))[:count]
