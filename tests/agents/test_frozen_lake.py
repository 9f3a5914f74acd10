"""The frozen lake: its rules, its boards, and what a model is given to imitate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.agents.frozen_lake import (
    GOAL,
    HOLE,
    MOVES,
    PLAYER,
    FrozenLake,
    heldout_rows,
    rows,
    shortest_path,
)
from milescli.rollout.environments import Step

BOARD = "P.O/..G/O.."


def _walk(label: str, *actions: str, **settings: bool) -> list[Step]:
    lake = FrozenLake(**settings)
    assert lake.reset(prompt="", label=label, seed=0) is None
    return [lake.step(action) for action in actions]


def test_the_goal_pays_and_a_hole_ends_it() -> None:
    steps = _walk(BOARD, "right", "down", "right")
    assert [step.reward for step in steps] == [0, 0, 1] and steps[-1].ended
    assert steps[0].observation == ". P O\n. . G\nO . .\ncloser: down"
    fallen = _walk(BOARD, "right", "right")[-1]
    assert fallen.ended and fallen.reward == 0
    assert _walk(BOARD, "stop")[-1] == Step(ended=True)


@pytest.mark.parametrize("action", ["up", "left", "north", "", "right right", "é" * 999])
def test_what_cannot_be_done_moves_nothing(action: str) -> None:
    (step,) = _walk(BOARD, action)
    assert step.observation.startswith("P . O") and not step.ended and step.reward == 0


@given(st.integers(0, 10**9), st.lists(st.sampled_from([*MOVES]), max_size=12))
def test_it_is_the_same_for_the_same_seed(seed: int, actions: list[str]) -> None:
    def played() -> list[object]:
        lake = FrozenLake(is_slippery=True)
        seen: list[object] = [lake.reset(prompt="", label=str(seed), seed=seed)]
        for action in actions:
            seen.append(step := lake.step(action))
            if step.ended:  # type: ignore[attr-defined]
                break
        return seen

    assert played() == played()


def test_a_slip_goes_aside_and_never_back() -> None:
    landed = set()
    for seed in range(60):
        lake = FrozenLake(is_slippery=True)
        lake.reset(prompt="", label=".../.P./..G", seed=seed)
        (step,) = [lake.step("up")]
        landed.add(step.observation.split("\ncloser:")[0])
    up, left, right = ". P .\n. . .\n. . G", ". . .\nP . .\n. . G", ". . .\n. . P\n. . G"
    assert landed == {up, left, right}


def test_demonstrations_reach_the_goal_and_no_held_out_board_is_trained_on() -> None:
    trained = list(rows(seed=0))
    assert trained == list(rows(seed=0)) and len({row["label"] for row in trained}) == len(trained)
    heldout = list(heldout_rows(seed=1))
    assert not {row["label"] for row in heldout} & {row["label"] for row in trained}
    walked = [row for row in trained if len(row["demonstration"]) > 1]
    assert 0.2 < len(walked) / len(trained) < 0.4
    for row in walked[:300]:
        said = [turn["content"] for turn in row["demonstration"] if turn["role"] == "assistant"]
        shown = [turn["content"] for turn in row["demonstration"] if turn["role"] == "user"]
        steps = _walk(row["label"], *said)
        assert [step.observation for step in steps[:-1]] == shown
        assert steps[-1].reward == 1 and len(said) == len(shortest_path(row["label"].split("/")))


def test_boards_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="no space for 3 holes"):
        FrozenLake(size=2, num_holes=3)
    drawn = FrozenLake(size=2, num_holes=0).reset(prompt="", label="4", seed=0)
    assert drawn is not None and HOLE not in drawn.split("\n", 1)[1].split("closer:")[0]
    assert PLAYER in drawn and GOAL in drawn
