"""The plug-ins that choose what is trained on: which prompts come next, which groups and samples
are kept, and rewards between scoring and training."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from milescli.core.errors import RecipeError
from milescli.core.examples import example_groups
from milescli.core.plug_points import FILTERS, SHAPINGS
from milescli.core.types import Group, Prompt, RewardDetail, Sample, WeightVersion
from milescli.recipe.data import Data
from milescli.recipe.schema import Recipe, Rollout
from milescli.recipe.section import refuse
from milescli.recipe.train import algorithm_rules
from milescli.rollout.collect.collector import Collector
from milescli.rollout.collect.selectors import (
    PromptResult,
    checked_places,
    history_from_state,
    history_to_state,
    is_kept,
    learnable,
    record_rewards,
    select_groups,
    shape_rewards,
    variance,
)
from milescli.workers.isolated import resolve_isolated
from tests.rollout.engines import ScriptedEngine, make_episodes, make_scorer, make_source
from tests.samples import make_group, make_sample, make_trajectory, rewarded

V0 = WeightVersion(0)


def _recipe(**sections: dict[str, Any]) -> Recipe:
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 3, **sections.pop("rollout", {})}
    return Recipe.model_validate({"rollout": rollout, **sections})


def _collector(recipe: Recipe, reward: Any = None, *, num_prompts: int = 40) -> Collector:
    scorer = make_scorer(reward) if reward else None
    episodes = make_episodes(ScriptedEngine(), scorer=scorer)
    return Collector(make_source(num_prompts), episodes, recipe=recipe)


def _taken(collector: Collector, steps: int = 1) -> list[list[int]]:
    async def run() -> list[list[int]]:
        taken = list[Sequence[Group]]()
        for step in range(1, steps + 1):
            taken.append(await collector.take(step, version=V0))
        return [[group.prompt.index for group in groups] for groups in taken]

    return asyncio.run(run())


def test_the_groups_whose_rewards_differ_most_are_taken_in_order() -> None:
    groups = example_groups()  # of unequal, of equal, and of mostly equal rewards
    assert variance(groups=groups, count=2, settings=Rollout()) == [0, 2]
    chosen = select_groups(variance, groups, count=1, settings=Rollout())
    assert [group.prompt.index for group in chosen] == [0]
    assert select_groups(variance, groups, count=3, settings=Rollout()) == groups


@pytest.mark.parametrize("said", [None, [0], [0, 0], [0, 3], [-1, 0], "ab", 5, [0.5, None]])
def test_what_is_no_choice_is_refused(said: object) -> None:
    with pytest.raises(RecipeError, match="the selection `mine` returned") as refused:
        checked_places(said, "selection", "mine", size=3, count=2)
    assert "choose 2 of 3" in refused.value.why


def test_a_selection_waits_for_all_and_moves_the_position_past_them() -> None:
    async def reward(*, prompt: str, response: str, label: str | None) -> float:
        return float(response) if int(prompt) % 2 else 1.0

    recipe = _recipe(rollout={"over_sampling": 2.0, "selection": "variance"})
    collector = _collector(recipe, reward)
    ((*indices,),) = _taken(collector)
    assert all(index % 2 for index in indices) and len(indices) == 4
    assert collector.position == 8


def test_a_curriculum_prefers_what_is_answered_half_of_the_time() -> None:
    prompts = [Prompt(index=n, token_ids=[n], text=str(n), label="0") for n in range(5)]
    history = {
        0: PromptResult(1.0, 1),
        1: PromptResult(0.5, 1),
        2: PromptResult(0.0, 2),
        4: PromptResult(0.9, 1),
    }
    settings = Data()
    places = learnable(candidates=prompts, history=history, count=3, settings=settings)
    assert list(places) == [1, 3, 4], "half right, untried, nearly solved"


def test_a_curriculum_learns_from_each_step_and_goes_on_from_its_state() -> None:
    async def reward(*, prompt: str, response: str, label: str | None) -> float:
        return float(int(prompt) < 6)  # solved; the others are too hard

    recipe = _recipe(data={"curriculum": "learnable", "curriculum_pool": 2.0})
    collector = _collector(recipe, reward, num_prompts=8)
    first, second, third = _taken(collector, 3)
    assert first == [0, 1, 2, 3] and second == [4, 5, 6, 7], "untried ones first"
    assert third == [0, 1, 2, 3], "all alike, as they come"
    assert collector.history[0] == PromptResult(1.0, 2) and collector.history[6] == PromptResult(
        0.0, 1
    )
    assert history_from_state(history_to_state(collector.history)) == collector.history

    other = _collector(recipe, reward, num_prompts=8)
    other.history.update(
        history_from_state(history_to_state({n: PromptResult(1.0, 1) for n in range(4)}))
    )
    assert _taken(other) == [[4, 5, 6, 7]]


def test_a_pool_beyond_the_epoch_offers_each_prompt_once() -> None:
    recipe = _recipe(data={"curriculum": "learnable", "curriculum_pool": 4.0})
    (taken,) = _taken(_collector(recipe, num_prompts=6))
    assert len(set(taken)) == 4
    (few,) = _taken(_collector(recipe, num_prompts=3))
    assert len(few) == 4 and set(few) == {0, 1, 2}


def test_a_pool_has_as_many_prompts_as_its_decimal_says() -> None:
    recipe = _recipe(
        rollout={"prompts_per_step": 50}, data={"curriculum": "learnable", "curriculum_pool": 1.1}
    )
    collector = _collector(recipe, num_prompts=100)
    _taken(collector)
    assert collector.position == 55, "50 * 1.1 is a little more in binary"


def test_without_a_curriculum_nothing_is_remembered() -> None:
    collector = _collector(_recipe())
    _taken(collector)
    assert collector.history == {}


def test_what_is_refused_by_the_filter_is_remembered_and_told() -> None:
    async def reward(*, prompt: str, response: str, label: str | None) -> float:
        return 1.0 if int(prompt) < 4 else float(response)

    recipe = _recipe(
        rollout={"filter": "zero_variance"}, data={"curriculum": "learnable", "curriculum_pool": 1}
    )
    collector = _collector(recipe, reward)
    _taken(collector)
    assert [group.prompt.index for group in collector.refused][:4] == [0, 1, 2, 3]
    assert {0, 1, 2, 3} <= set(collector.history)


def test_a_prompt_that_returns_counts_once_more() -> None:
    history: dict[int, PromptResult] = {}
    groups = example_groups()
    record_rewards(history, groups)
    record_rewards(history, groups[:1])
    assert history[0] == PromptResult(0.5625, 2) and history[1].times == 1


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"selection": "variance"}}, "has nothing to choose from"),
        (
            {"rollout": {"max_staleness": 1}, "data": {"curriculum": "learnable"}},
            "does not work when rollout runs ahead",
        ),
    ],
)
def test_what_cannot_work_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        refuse(algorithm_rules(_recipe(**sections)))


def doubled(*, group, settings):  # type: ignore[no-untyped-def]
    """A shaping of the user's."""
    return [2 * reward for reward in group.rewards]


def one_only(*, group, settings):  # type: ignore[no-untyped-def]
    """Too few."""
    return [1.0]


def not_numbers(*, group, settings):  # type: ignore[no-untyped-def]
    """NaN."""
    return [float("nan")] * len(group.samples)


def raising(*, group, settings):  # type: ignore[no-untyped-def]
    """Its author's mistake."""
    raise KeyError("difficulty")


def maybe(*, group, settings):  # type: ignore[no-untyped-def]
    """Neither yes nor no."""
    return "perhaps"


def _lengths(*lengths: int) -> Group:
    return make_group(
        [
            make_sample(make_trajectory([1], [2] * length), reward=1.0, index=index)
            for index, length in enumerate(lengths)
        ]
    )


def test_overlong_responses_lose_reward_within_the_buffer() -> None:
    settings = Rollout(
        max_response_tokens=20, shaping="overlong", overlong_buffer=4, overlong_penalty=0.5
    )
    group = shape_rewards(
        resolve_isolated(SHAPINGS, "overlong"), _lengths(1, 16, 18, 20), settings=settings
    )
    assert group.rewards == [1.0, 1.0, 0.75, 0.5]


def test_the_buffer_is_a_fifth_where_nobody_says_how_much() -> None:
    settings = Rollout(max_response_tokens=20)
    group = shape_rewards(
        resolve_isolated(SHAPINGS, "overlong"), _lengths(16, 20), settings=settings
    )
    assert group.rewards == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "why"), [("one_only", "1 rewards for 2 samples"), ("not_numbers", "must be finite")]
)
def test_rewards_that_cannot_be_trained_on_are_named(name: str, why: str) -> None:
    path = f"{__name__}:{name}"
    with pytest.raises(RecipeError, match=f"the shaping `{path}` returned") as refused:
        shape_rewards(
            resolve_isolated(SHAPINGS, path), rewarded([0.0, 1.0]), settings=Rollout(shaping=path)
        )
    assert why in refused.value.why


def test_what_a_shaping_raises_is_named_with_its_line() -> None:
    path = f"{__name__}:raising"
    with pytest.raises(RecipeError, match=f"the shaping `{path}` failed") as refused:
        shape_rewards(
            resolve_isolated(SHAPINGS, path), rewarded([0.0]), settings=Rollout(shaping=path)
        )
    assert "difficulty" in refused.value.why and "test_selectors.py" in refused.value.why


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("none", [1.0, 1.0], True),
        ("zero_variance", [1.0, 1.0], False),
        ("zero_variance", [1.0, 0.0], True),
        ("pass_rate", [1.0, 1.0], False),
        ("pass_rate", [0.0, 0.0], False),
        ("pass_rate", [1.0, 0.0], True),
    ],
)
def test_filters_keep_what_teaches(name: str, rewards: list[float], expected: bool) -> None:
    settings = Rollout(filter=name)
    assert (
        is_kept(resolve_isolated(FILTERS, name), rewarded(rewards), settings=settings) is expected
    )


def _paid(*turns: float, reward: float = 1.0, **parts: float) -> Sample:
    """A sample of turns of one token each, with their rewards."""
    mask = [place % 2 == 0 for place in range(2 * len(turns))]
    line = make_trajectory([1], range(len(mask)), mask=mask)
    row = [0.0, *(x for reward in turns for x in (reward, 0.0))]
    paid = replace(line, rewards=array("f", row) if turns else None)
    return replace(make_sample(paid, reward=reward), reward_parts=parts)


@pytest.mark.parametrize(
    ("samples", "detail"),
    [
        ([_paid(math=1.0, form=0.0), _paid(math=0.5, form=1.0)], RewardDetail.PARTS),
        ([_paid(math=1.0), _paid(form=2.0)], RewardDetail.PARTS),
        ([_paid(1.0, 0.0), _paid(0.0, 1.0)], RewardDetail.TURNS),
        ([_paid(1.0), _paid(0.0, 1.0)], RewardDetail.TURNS),
    ],
)
def test_groups_differ_where_the_estimator_compares_more_than_the_sums(
    samples: list[Sample], detail: RewardDetail
) -> None:
    keep, settings = resolve_isolated(FILTERS, "zero_variance"), Rollout(filter="zero_variance")
    group = make_group(samples)
    assert is_kept(keep, group, settings=settings, compared={detail})
    others = {*RewardDetail} - {detail}
    assert not is_kept(keep, group, settings=settings, compared=others)
    same = make_group([samples[0], samples[0]])
    assert not is_kept(keep, same, settings=settings, compared={*RewardDetail})


def test_turns_that_got_nothing_are_equal_however_many_there_are() -> None:
    group = make_group([_paid(0.0, reward=0.0), _paid(0.0, 0.0, reward=0.0)])
    keep, settings = resolve_isolated(FILTERS, "zero_variance"), Rollout(filter="zero_variance")
    assert not is_kept(keep, group, settings=settings, compared={RewardDetail.TURNS})


def test_a_filter_that_says_neither_is_named() -> None:
    path = f"{__name__}:maybe"
    with pytest.raises(RecipeError, match="returned 'perhaps'"):
        is_kept(resolve_isolated(FILTERS, path), rewarded([1.0]), settings=Rollout(filter=path))
