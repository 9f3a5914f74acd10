"""Each advantage estimator against its formula, written out once more with numpy, and against what
it must keep for any rewards."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.errors import RecipeError
from milescli.core.plug_points import ADVANTAGES
from milescli.core.types import Group, Sample, Trajectory
from milescli.recipe.train import Train
from milescli.train.advantages import estimate
from milescli.workers.isolated import resolve_isolated
from tests.samples import make_group, make_sample, make_trajectory

BATCHES = st.lists(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.25, 1.0, 2.0]), st.integers(1, 9)),
        min_size=2,
        max_size=6,
    ),
    min_size=1,
    max_size=4,
)
"""[groups][samples] (reward, trained tokens)"""


def _groups(batch: list[list[tuple[float, int]]]) -> list[Group]:
    return [
        make_group(
            [
                make_sample(make_trajectory([1], [2] * length), reward=reward, index=index)
                for index, (reward, length) in enumerate(row)
            ]
        )
        for row in batch
    ]


def _of(name: str, groups: list[Group], **settings: object) -> list[np.ndarray]:
    rows = estimate(
        resolve_isolated(ADVANTAGES, name), groups, settings=Train(advantage=name, **settings)
    )
    return [np.array(row) for row in rows]


def _rewards(row: list[tuple[float, int]]) -> np.ndarray:
    return np.array([reward for reward, _ in row])


@given(BATCHES)
def test_baselines_are_what_their_papers_subtract(batch: list[list[tuple[float, int]]]) -> None:
    groups = _groups(batch)
    telling = sum(len(row) for row in batch if np.ptp(_rewards(row)) > 0)
    alpha = sum(len(row) for row in batch) / max(telling, 1)
    made = {name: _of(name, groups) for name in ("reinforce", "rloo", "opo", "gpg", "max_rl")}
    for index, row in enumerate(batch):
        rewards, lengths = _rewards(row), np.array([length for _, length in row])
        count, mean = len(rewards), rewards.mean()
        assert made["reinforce"][index] == pytest.approx(rewards)
        assert made["rloo"][index] == pytest.approx((rewards - mean) * count / (count - 1))
        assert made["opo"][index] == pytest.approx(rewards - np.average(rewards, weights=lengths))
        assert made["gpg"][index] == pytest.approx(alpha * (rewards - mean))
        expected = (rewards - mean) / mean if mean else 0 * rewards
        assert made["max_rl"][index] == pytest.approx(expected)


def test_remax_refuses_rewards_that_the_greedy_response_lacks() -> None:
    """An agent of the user's gives them; those of the recipe are refused before the launch."""
    line = replace(make_trajectory([1], [2]), role="pro")
    sample = replace(make_sample(line, reward=0.0), role_rewards={"pro": 10.0})
    group = replace(make_group([sample, sample]), greedy_reward=0.0)
    with pytest.raises(RecipeError, match="`remax` does not support rewards of roles"):
        _of("remax", [group])


def test_remax_subtracts_the_reward_of_the_greedy_response() -> None:
    (group,) = _groups([[(1.0, 2), (0.0, 3)]])
    (row,) = _of("remax", [replace(group, greedy_reward=0.25)])
    assert row.tolist() == [0.75, -0.25]


@given(
    st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=9),
    st.integers(1, 4),
)
def test_pass_at_k_is_the_mean_over_all_subsets(rewards: list[float], k: int) -> None:
    """A sample's advantage is that of the k-subsets it is in, each worth its best, normalised over
    all k-subsets: what the paper's closed form sums up."""
    if k >= len(rewards):
        return
    subsets = list(itertools.combinations(range(len(rewards)), k))
    worth = np.array([max(rewards[i] for i in subset) for subset in subsets])
    (row,) = _of("pass_at_k", _groups([[(reward, 1) for reward in rewards]]), pass_k=k)
    if worth.std() == 0:
        assert not row.any()
        return
    normalised = (worth - worth.mean()) / worth.std()
    expected = [
        np.mean([value for subset, value in zip(subsets, normalised, strict=True) if i in subset])
        for i in range(len(rewards))
    ]
    assert row == pytest.approx(expected, abs=1e-9)


def test_the_best_of_a_group_has_its_lead_over_the_second() -> None:
    groups = _groups([[(0.0, 1), (2.0, 1), (1.5, 1)], [(1.0, 1), (1.0, 1)]])
    first, second = _of("best_of_n", groups, normalize_std="none")
    assert first.tolist() == [0.0, 0.5, 0.0] and second.tolist() == [0.0, 0.0]
    (scaled, _) = _of("best_of_n", groups)
    assert scaled[1] == pytest.approx(0.5 / (np.std([0, 2, 1.5], ddof=1) + 1e-6))


def test_max_rl_refuses_a_reward_that_is_no_chance() -> None:
    with pytest.raises(RecipeError, match="does not support the reward -1"):
        _of("max_rl", _groups([[(-1.0, 1), (1.0, 1)]]))


def _episode(*turns: tuple[list[int], list[int]], reward: float, index: int):  # type: ignore[no-untyped-def]
    """Turns of (observation, answer) as one trajectory."""
    ids, mask = [], []
    for observation, answer in turns:
        ids += [*observation, *answer]
        mask += [False] * len(observation) + [True] * len(answer)
    prompt = turns[0][0]
    trajectory = make_trajectory(prompt, ids[len(prompt) :], mask=mask[len(prompt) :])
    return make_sample(trajectory, reward=reward, index=index)


def test_gigpo_compares_turns_that_answered_the_same_observation() -> None:
    # all three begin at [1]; the first two then see [5], the third sees [6]
    group = make_group(
        [
            _episode(([1], [2, 3]), ([5], [4]), reward=1.0, index=0),
            _episode(([1], [2]), ([5], [9, 9]), reward=0.0, index=1),
            _episode(([1], [7]), ([6], [8]), reward=1.0, index=2),
        ]
    )
    settings = Train(advantage="gigpo", normalize_std="none", gamma=0.5, turn_weight=2.0)
    (rows,) = estimate(resolve_isolated(ADVANTAGES, "gigpo"), [group], settings=settings)
    episode = np.array([1, 0, 1]) - 2 / 3
    first = np.array([0.5, 0.0, 0.5]) - 1 / 3  # returns of the first turns: gamma r
    assert rows[0][0] == pytest.approx(
        [episode[0]]  # the prompt, which is not trained on
        + [episode[0] + 2 * first[0]] * 2
        + [episode[0]]
        + [episode[0] + 2 * 0.5]
    )
    assert rows[1][0][1] == pytest.approx(episode[1] + 2 * first[1])
    assert rows[1][0][3:] == pytest.approx([episode[1] - 2 * 0.5] * 2)
    assert rows[2][0][3] == pytest.approx(episode[2]), "it met nobody at [6]"


def test_hgpo_weighs_groups_by_the_history_that_their_turns_share() -> None:
    # all begin at [1]; at [5] all three meet, but two of them came there by [6]
    group = make_group(
        [
            _episode(([1], [2]), ([6], [3]), ([5], [4, 4]), reward=1.0, index=0),
            _episode(([1], [2]), ([6], [9]), ([5], [8]), reward=0.0, index=1),
            _episode(([1], [2]), ([7], [3]), ([5], [8]), reward=3.0, index=2),
        ]
    )
    settings = Train(advantage="hgpo", normalize_std="none", gamma=1.0, turn_history=2)
    (rows,) = estimate(resolve_isolated(ADVANTAGES, "hgpo"), [group], settings=settings)
    level_0 = np.array([1.0, 0.0, 3.0]) - 4 / 3
    shared = np.array([0.5, -0.5])  # of the two that came by [6], with 1 and with 2 before
    for index, (line,) in enumerate(rows):
        assert line[1] == pytest.approx(level_0[index]), "no turn was before"
    for index in (0, 1):
        at_5 = (level_0[index] + 2 * shared[index] + 3 * shared[index]) / 6
        assert rows[index][0][5:] == pytest.approx(at_5)
        assert rows[index][0][3] == pytest.approx(shared[index]), "[6], and [1] before: 1 and 2"
    assert rows[2][0][5] == pytest.approx(level_0[2]), "it met them at [5] alone"
    assert rows[2][0][3] == 0.0, "it met nobody at [7]"
    plain = settings.model_copy(update={"turn_history": 0})
    (flat,) = estimate(resolve_isolated(ADVANTAGES, "hgpo"), [group], settings=plain)
    (whole,) = estimate(resolve_isolated(ADVANTAGES, "gigpo"), [group], settings=plain)
    for sample, episode, own, both in zip(group.samples, level_0, flat, whole, strict=True):
        mask = np.frombuffer(sample.trajectories[0].loss_mask, np.bool_)
        assert (own[0] + episode)[mask] == pytest.approx(both[0][mask]), "without history: GiGPO's"


def _of_turns(*rewards: float, beyond: float = 0.0, index: int) -> Sample:
    """Two tokens a turn, behind one that was not sampled; `beyond`: of the whole episode."""
    turns = [([1], [2, 3]) for _ in rewards]
    sample = _episode(*turns, reward=sum(rewards) + beyond, index=index)
    row = array("f", [value for reward in rewards for value in (0.0, 0.0, reward)])
    (trajectory,) = sample.trajectories
    return replace(sample, trajectories=[replace(trajectory, rewards=row)])


def test_a_turn_is_not_credited_with_what_was_had_before_it() -> None:
    group = make_group(
        [
            _of_turns(1.0, 0.0, index=0),
            _of_turns(0.0, 0.0, 2.0, index=1),
            _of_turns(0.0, 0.0, beyond=4.0, index=2),
        ]
    )
    settings = Train(advantage="turns", normalize_std="none", gamma=0.5)
    (rows,) = estimate(resolve_isolated(ADVANTAGES, "turns"), [group], settings=settings)
    first = np.array([1.0, 0.5, 2.0])  # gamma^(turns until it comes) r
    second = np.array([0.0, 1.0, 4.0])
    for index, row in enumerate(rows):
        assert row[0][[0, 3]] == pytest.approx(0.0)
        assert row[0][1:3] == pytest.approx(first[index] - first.mean())
        assert row[0][4:6] == pytest.approx(second[index] - second.mean())
    assert rows[1][0][7:9] == pytest.approx(0.0), "no other has a third turn"
    scaled = estimate(
        resolve_isolated(ADVANTAGES, "turns"), [group], settings=Train(advantage="turns", gamma=0.5)
    )
    expected = (first[0] - first.mean()) / (first.std(ddof=1) + 1e-6)
    assert scaled[0][0][0][1:3] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["turns", "hgpo"])
@given(BATCHES)
def test_of_one_turn_without_rewards_of_its_own_it_is_grpo(
    name: str, batch: list[list[tuple[float, int]]]
) -> None:
    groups = _groups(batch)
    for row, plain in zip(
        estimate(resolve_isolated(ADVANTAGES, name), groups, settings=Train(advantage=name)),
        _of("grpo", groups),
        strict=True,
    ):
        for sample, value in zip(row, plain, strict=True):
            assert sample[0][1:] == pytest.approx(value, rel=1e-4, abs=1e-5)


def wrong_shape(*, groups, settings):  # type: ignore[no-untyped-def]
    """Of the sampled tokens alone, where all are wanted."""
    return [[[np.zeros(2)] for _ in group.samples] for group in groups]


def bad_token(*, groups, settings):  # type: ignore[no-untyped-def]
    """NaN at one token."""
    return [[[np.array([0.0, np.nan, 0.0])] for _ in group.samples] for group in groups]


@pytest.mark.parametrize(
    ("estimator", "gave"), [(wrong_shape, r"arrays of shapes \[\(2,\)\]"), (bad_token, "nan")]
)
def test_advantages_of_tokens_that_do_not_fit_are_named(estimator, gave: str) -> None:  # type: ignore[no-untyped-def]
    groups = _groups([[(1.0, 2), (0.0, 2)]])
    with pytest.raises(RecipeError, match=f"the advantage estimator `.*` returned {gave}"):
        estimate(estimator, groups, settings=Train())


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "opo", "gpg", "turns", "gigpo", "hgpo", "best_of_n"]
)
def test_roles_with_rewards_of_their_own_are_compared_among_themselves(name: str) -> None:
    rewards = {"pro": [1.0, 0.0, 0.5], "contra": [-3.0, 3.0, 1.0], None: [0.0, 1.0, 0.0]}

    def line(role: str | None, place: int) -> Trajectory:
        size = 1 + place + len(role or "")
        return replace(make_trajectory([1], [2] * size), role=role or "host")

    def group(*roles: str | None) -> Group:
        return make_group(
            [
                replace(
                    make_sample(*(line(role, place) for role in roles), index=place),
                    reward=rewards[None][place],
                    role_rewards={role: rewards[role][place] for role in roles if role},
                )
                for place in range(3)
            ]
        )

    def last(value: object) -> float:
        return float(np.ravel(value)[-1])

    settings = Train(advantage=name)
    (rows,) = estimate(
        resolve_isolated(ADVANTAGES, name), [group("pro", None, "contra")], settings=settings
    )
    for place, role in enumerate(("pro", None, "contra")):
        alone = make_group(
            [
                make_sample(line(role, index), reward=reward, index=index)
                for index, reward in enumerate(rewards[role])
            ]
        )
        (wanted,) = estimate(resolve_isolated(ADVANTAGES, name), [alone], settings=settings)
        for made, own in zip(rows, wanted, strict=True):
            assert last(made[place]) == pytest.approx(last(own), abs=1e-6)


PARTS = st.lists(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 2.0, 40.0])),
        min_size=2,
        max_size=6,
    ),
    min_size=2,
    max_size=4,
)
"""[groups][samples] rewards of two kinds"""
WEIGHTS = {"math": 1.0, "format": 0.25}


def _of_parts(batch: list[list[tuple[float, float]]], shaping: float = 0.0) -> list[Group]:
    return [
        make_group(
            [
                replace(
                    make_sample(
                        make_trajectory([1], [2]),
                        reward=one + 0.25 * other + shaping * (index % 2),
                        index=index,
                    ),
                    reward_parts={"math": one, "format": other},
                )
                for index, (one, other) in enumerate(row)
            ]
        )
        for row in batch
    ]


def _gdpo(groups: list[Group]) -> np.ndarray:
    estimator = resolve_isolated(ADVANTAGES, "gdpo")
    rows = estimate(estimator, groups, settings=Train(), weights=WEIGHTS)
    return np.concatenate([np.array(row) for row in rows])


def _normal(values: np.ndarray) -> np.ndarray:
    std = values.std(axis=0, ddof=1)
    return (values - values.mean(axis=0)) / np.where(std > 1e-9, std, np.inf)


@given(PARTS, st.sampled_from([0.0, 0.5]))
def test_gdpo_normalises_each_reward_before_their_sum(
    batch: list[list[tuple[float, float]]], shaping: float
) -> None:
    scores = []
    for row in batch:
        rewards = _normal(np.array(row, dtype=float))
        rest = _normal(shaping * (np.arange(len(row)) % 2.0))
        scores.append(rewards @ np.array([1.0, 0.25]) + rest)
    assert _gdpo(_of_parts(batch, shaping)) == pytest.approx(
        _normal(np.concatenate(scores)), abs=1e-3
    )


def test_gdpo_tells_apart_what_equal_sums_hide() -> None:
    batch = [[(1.0, 0.0), (0.0, 4.0), (0.0, 0.0)], [(1.0, 4.0), (0.0, 0.0), (0.0, 0.0)]]
    groups = _of_parts(batch)
    assert groups[0].rewards == [1.0, 1.0, 0.0]
    same, apart = _of("grpo", groups)[0], _gdpo(groups)
    assert same[0] == same[1] and apart[0] > apart[1] > apart[2]


def test_gdpo_of_one_reward_is_grpo_normalised_over_the_batch() -> None:
    groups = _groups([[(1.0, 1), (0.0, 1)], [(2.0, 1), (1.0, 1), (0.0, 1)]])
    grpo = np.concatenate(_of("grpo", groups))
    assert _gdpo(groups) == pytest.approx(_normal(grpo), abs=1e-4)
