"""Trials that harbor runs, in a place of the tests' that needs no container. Left out where that
package has no virtual environment here."""

from __future__ import annotations

from typing import Any

import pytest

from milescli.agents.foreign.playing import require_foreign_environment
from milescli.agents.harbor import HarborAgent, tasks
from milescli.core.errors import AgentError, RecipeError
from milescli.recipe.agents import rules
from milescli.recipe.schema import Recipe, Rollout
from milescli.recipe.section import refuse
from tests.agents.foreign.sessions import GIVEN, ended, needs, played

__all__ = ["ended"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run would be begun."""
    monkeypatch.chdir(GIVEN)


def rollout_of(**settings: Any) -> Rollout:
    """Of the one task."""
    harbor = {
        "tasks": "tasks",
        "agent": "miles_places:OneCommand",
        "environment": "miles_places:Folder",
        **settings,
    }
    return Rollout.model_validate({"agent": "harbor", "harbor": harbor})


@needs("harbor")
@pytest.mark.parametrize(("word", "reward"), [("hello", 1.0), ("bye", 0.0)])
def test_a_task_is_worked_at_and_verified(word: str, reward: float) -> None:
    rollout = rollout_of()
    (row,) = tasks(rollout)
    assert "the word hello" in row["prompt"] and row["label"] == "hello"
    said = f"printf {word} > greeting"
    outcome, session = played(HarborAgent(rollout), [said], row["label"])
    assert (outcome.text, outcome.reward, outcome.is_cut) == (said, reward, False)
    assert outcome.figures == {"verifier_reward": reward}
    (line,) = session.trajectories()
    assert sum(line.loss_mask) == len(session.turns[0].response_ids)


@needs("harbor")
def test_what_cannot_be_worked_at_is_told() -> None:
    with pytest.raises(AgentError) as caught:
        played(HarborAgent(rollout_of()), ["true"], "goodbye")
    assert "there is no task 'goodbye'" in caught.value.why
    with pytest.raises(RecipeError) as refused:
        require_foreign_environment(rollout_of(tasks="nowhere"))
    assert "does not contain a harbor task (a" in refused.value.why


@needs("harbor")
def test_containers_that_cannot_be_had_are_refused_before_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RecipeError) as caught:
        require_foreign_environment(rollout_of(environment="docker"))
    assert "Docker is not installed" in caught.value.why


@needs("harbor")
def test_an_agent_that_runs_out_of_time_is_scored_and_cut() -> None:
    rollout = rollout_of(agent_options={"override_timeout_sec": 3.0})
    said = "printf hello > greeting; exec sleep 60"
    outcome, _ = played(HarborAgent(rollout), [said], "hello")
    assert outcome.is_cut and outcome.reward == 1.0


def test_a_recipe_says_which_tasks() -> None:
    with pytest.raises(RecipeError, match="the agent `harbor` needs tasks"):
        refuse(rules(Recipe.model_validate({"rollout": {"agent": "harbor"}})))
