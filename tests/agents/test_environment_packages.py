"""Environments of other packages, as text. Each is left out where its package is not installed."""

from __future__ import annotations

import pytest

from milescli.agents.gymnasium import GymnasiumText
from milescli.agents.reasoning_gym import ReasoningGymTask
from milescli.agents.textarena import TextArenaGame
from milescli.rollout.environment_contract import check_environment


def test_gymnasium_is_seen_as_text_and_moved_by_words() -> None:
    pytest.importorskip("gymnasium")
    settings = {
        "id": "FrozenLake-v1",
        "is_slippery": False,
        "actions": ["left", "down", "right", "up"],
    }
    lake = GymnasiumText(**settings)
    start = lake.reset(prompt="", label=None, seed=0)
    assert start == "Say one of: left, down, right, up.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    unclear = lake.step("well")
    assert unclear.figures == {"not_understood": 1.0} and not unclear.ended
    said = ["I go down.", "down", "right", "DOWN", "right", "right"]
    steps = [lake.step(word) for word in said]
    assert steps[0].observation.endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1] and steps[-1].ended
    lake.close()
    check_environment("gymnasium", settings=settings, actions=["left", "down", "right", "up"])
    with pytest.raises(ValueError, match="4 actions, but 1 words"):
        GymnasiumText(id="FrozenLake-v1", actions=["go"])
    with pytest.raises(ValueError, match="cannot be named one by one"):
        GymnasiumText(id="Pendulum-v1")


def test_a_game_of_textarena_is_played_to_its_end() -> None:
    pytest.importorskip("textarena")
    game = TextArenaGame(id="GuessTheNumber-v0")
    start = game.reset(prompt="", label=None, seed=3)
    assert start is not None and "between 1 and 20" in start
    low, high, rewards = 1, 20, list[float]()
    for _ in range(6):
        middle = (low + high) // 2
        step = game.step(f"[{middle}]")
        rewards.append(step.reward)
        if step.ended:
            break
        last = step.observation.strip().rsplit("\n", 1)[-1]
        low, high = (middle + 1, high) if "higher" in last else (low, middle - 1)
    assert step.ended and rewards[-1] == 1.0
    check_environment("textarena", settings={"id": "GuessTheNumber-v0"}, actions=["[5]", "[9]"])


def test_a_task_of_reasoning_gym_scores_its_own_answer() -> None:
    pytest.importorskip("reasoning_gym")
    import reasoning_gym

    right = reasoning_gym.create_dataset("chain_sum", seed=5, size=1)[0]
    task = ReasoningGymTask(task="chain_sum")
    assert task.reset(prompt="", label=None, seed=5) == right["question"]
    assert task.step(f"so <answer>{right['answer']}</answer>").reward == 1.0
    task.reset(prompt="", label=None, seed=5)
    wrong = task.step("no")
    assert wrong.ended and wrong.reward < 1.0
