"""Episodes that verifiers plays, by environments of its own classes: of one turn, of many, with
tools. Left out where that package has no virtual environment here."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from milescli.agents.foreign.playing import require_foreign_environment
from milescli.agents.verifiers import VerifiersAgent, tasks
from milescli.core.errors import AgentError, MachineError, RecipeError
from milescli.data.tasks import write_task
from milescli.recipe.agents import rules
from milescli.recipe.schema import Recipe, Rollout
from milescli.recipe.section import refuse
from tests.agents.foreign.sessions import GIVEN, all_played, ended, needs, played

__all__ = ["ended"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run would be begun."""
    monkeypatch.chdir(GIVEN)


def rollout_of(environment: str, **settings: Any) -> Rollout:
    """An environment's."""
    verifiers = {"environment": environment, "num_tasks": 20, **settings}
    return Rollout.model_validate({"agent": "verifiers", "verifiers": verifiers, "max_turns": 4})


@needs("verifiers")
def test_an_episode_of_one_turn_is_recorded_and_scored_there() -> None:
    rollout = rollout_of("miles-words", arguments={"num": 8})
    rows = tasks(rollout)
    assert len(rows) == 8
    assert rows[1]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say w1."},
    ]
    agent = VerifiersAgent(rollout)
    outcome, session = played(agent, ["w1"], rows[1]["label"])
    assert (outcome.text, outcome.reward, outcome.is_cut) == ("w1", 1.0, False)
    assert outcome.figures == {"says_it": 1.0, "length": 2.0}
    (line,) = session.trajectories()
    said = session.turns[0].response_ids
    assert line.token_ids.tolist()[-len(said) :] == said
    assert sum(line.loss_mask) == len(said)
    outcome, _ = played(agent, ["w2..."], rows[1]["label"])
    assert outcome.is_cut and outcome.reward == 0.0
    by_number, _ = played(agent, ["w5"], "5")
    assert by_number.reward == 1.0


@needs("verifiers")
def test_many_episodes_at_once_do_not_mix() -> None:
    rollout = rollout_of("miles-words", arguments={"num": 8})
    rows = tasks(rollout)
    agent = VerifiersAgent(rollout)
    episodes = [([f"w{number}"], rows[number]["label"]) for number in range(8)] * 4
    made = asyncio.run(all_played(agent, episodes))
    assert [outcome.reward for outcome, _ in made] == [1.0] * 32
    assert [session.turns[0].text for _, session in made] == [texts[0] for texts, _ in episodes]


@needs("verifiers")
def test_turns_of_an_episode_are_one_trajectory_and_bounded() -> None:
    rollout = rollout_of("miles-guessing")
    rows = tasks(rollout)
    assert len(rows) == 20  # of tasks without an end
    agent = VerifiersAgent(rollout)
    outcome, session = played(agent, ["3", "4", "1"], rows[1]["label"])
    assert outcome.reward == pytest.approx(1 / 3) and outcome.figures["guesses"] == 3.0
    (line,) = session.trajectories()
    assert sum(line.loss_mask) == sum(len(turn.response_ids) for turn in session.turns)
    outcome, session = played(agent, ["9"] * 9, rows[1]["label"])
    assert outcome.is_cut and outcome.reward == 0.0 and len(session.turns) == rollout.max_turns
    outcome, session = played(agent, ["9"] * 9, rows[1]["label"], max_tokens=80)
    assert outcome.is_cut and 0 < len(session.turns) < rollout.max_turns  # it was full


@needs("verifiers")
def test_tools_of_an_environment_are_called_there() -> None:
    rollout = rollout_of("miles-adding")
    label = tasks(rollout)[1]["label"]
    said = ['<tool>add_tools_add({"a": 20, "b": 1})</tool>', "2"]
    outcome, session = played(VerifiersAgent(rollout), said, label)
    assert outcome.reward == 1.0 and outcome.figures["told"] == 21.0
    (line,) = session.trajectories()
    assert len(session.turns) == 2 and line.num_tokens


@needs("verifiers")
def test_a_seat_that_is_not_trained_is_not_played_by_the_policy() -> None:
    rollout = rollout_of("miles-duo")
    with pytest.raises(AgentError) as caught:
        played(VerifiersAgent(rollout), ["ab", "cde"], tasks(rollout)[0]["label"])
    assert "the seat `critic` is not to be trained" in caught.value.why


@needs("verifiers")
def test_an_environment_that_is_not_there_is_refused_before_a_run() -> None:
    with pytest.raises(RecipeError) as caught:
        require_foreign_environment(rollout_of("miles-nothing"))
    assert "`rollout.verifiers` cannot be loaded" in caught.value.what
    assert "taskset 'miles-nothing' not found" in caught.value.why
    with pytest.raises(AgentError, match="an episode of verifiers failed"):
        played(VerifiersAgent(rollout_of("miles-words")), ["a"], json.dumps({"idx": 3}))


def test_without_its_virtual_environment_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("MILES_ENVIRONMENTS", str(tmp_path))
    with pytest.raises(MachineError) as caught:
        VerifiersAgent(rollout_of("miles-words"))
    assert caught.value.fixes == ["miles env install verifiers"]


def test_a_recipe_says_which_environment() -> None:
    with pytest.raises(RecipeError, match="the agent `verifiers` needs an environment"):
        refuse(rules(Recipe.model_validate({"rollout": {"agent": "verifiers"}})))
    with pytest.raises(RecipeError, match="`task:verifiers` needs a recipe"):
        write_task("task:verifiers", ".", 0)
