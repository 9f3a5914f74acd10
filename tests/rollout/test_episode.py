"""Episodes: whatever an agent does wrong is named with its place, before anything is trained on."""

from __future__ import annotations

import asyncio

import pytest

from milescli.core.errors import AgentError, RecipeError
from milescli.core.types import Prompt, Sample
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Agent, Outcome, Session
from milescli.rollout.episode import load_agent
from tests.rollout.engines import ScriptedEngine, make_episodes

PROMPT = Prompt(index=3, token_ids=[1, 2], text="how many?", label="0")


def _play(agent: Agent) -> Sample:
    episodes = make_episodes(ScriptedEngine(), agent=agent)
    return asyncio.run(episodes.play(PROMPT, sample_index=2, seed=47))


def test_the_built_in_agent_asks_once_and_the_reward_scores_its_text() -> None:
    sample = _play(load_agent(Rollout()))
    assert (sample.sample_index, sample.seed, sample.text, sample.reward) == (2, 47, "7", 7.0)
    assert sample.response_ids == [7] and sample.num_loss_tokens == 1


def test_an_agent_that_knows_its_reward_is_believed() -> None:
    async def solve(prompt: Prompt, session: Session) -> Outcome:
        turn = await session.generate(prompt.token_ids)
        await session.generate([*turn.prompt_ids, *turn.response_ids, 9])
        return Outcome(text="not a number", reward=0.25)

    sample = _play(solve)
    assert sample.reward == 0.25 and sample.num_loss_tokens == 2
    assert len(sample.trajectories) == 1


async def _raises(prompt: Prompt, session: Session) -> Outcome:
    await session.generate(prompt.token_ids)
    raise KeyError("no such tool")


async def _silent(prompt: Prompt, session: Session) -> Outcome:
    return Outcome(text="")


async def _forgets(prompt: Prompt, session: Session) -> Outcome:
    await session.generate(prompt.token_ids)
    return "done"  # type: ignore[return-value]


async def _wordless(prompt: Prompt, session: Session) -> Outcome:
    await session.generate(prompt.token_ids)
    return Outcome(text=None)  # type: ignore[arg-type]


async def _nan(prompt: Prompt, session: Session) -> Outcome:
    await session.generate(prompt.token_ids)
    return Outcome(text="", reward=float("nan"))


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (_raises, 'raise KeyError("no such tool")'),
        (_silent, "without one call of session.generate"),
        (_forgets, "returned 'done' instead of an Outcome"),
        (_wordless, "the text of its Outcome is None"),
        (_nan, "the reward must be finite"),
    ],
)
def test_what_an_agent_does_wrong_is_named(agent: Agent, why: str) -> None:
    with pytest.raises(AgentError) as caught:
        _play(agent)
    assert "`test` failed on prompt 3" in caught.value.what and why in caught.value.why
    assert "rollout/episode.py" not in caught.value.why


def test_an_agent_is_checked_before_a_device_is_taken() -> None:
    with pytest.raises(RecipeError, match="no agent is called `singel_turn`") as caught:
        load_agent(Rollout(agent="singel_turn"))
    assert caught.value.fixes == ["--set rollout.agent=single_turn"]
    with pytest.raises(RecipeError, match="cannot be an agent"):
        load_agent(Rollout(agent="tests.rollout.test_episode:lacking"))


async def lacking(prompt: Prompt) -> Outcome:
    """No session."""
    return Outcome(text="")
