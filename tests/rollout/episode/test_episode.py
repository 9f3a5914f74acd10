"""Episodes: whatever an agent does wrong is named with its place, before anything is trained on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from milescli.core.errors import AgentError, RecipeError
from milescli.core.types import Prompt, Sample
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Agent, Outcome, Session
from milescli.rollout.episode.episode import load_agent
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


async def _half_rewarded(prompt: Prompt, session: Session) -> Outcome:
    await session.generate(prompt.token_ids)
    await session.generate(prompt.token_ids)
    return Outcome(text="", turn_rewards=[1.0])


async def _nan_turn(prompt: Prompt, session: Session) -> Outcome:
    await session.generate(prompt.token_ids)
    return Outcome(text="", turn_rewards=[float("nan")])


def _agent_with(**fields: Any) -> Agent:
    async def solve(prompt: Prompt, session: Session) -> Outcome:
        await session.generate(prompt.token_ids)
        return Outcome(**{"text": "", **fields})

    return solve


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (_agent_with(turn_rewards=None), "the turn_rewards of its Outcome is None"),
        (_agent_with(turn_rewards=[None]), "the reward must be a number, but is None"),
        (_agent_with(role_rewards=None), "the role_rewards of its Outcome is None"),
        (_agent_with(role_rewards={"judge": None}), "the reward of judge must be a number"),
        (_agent_with(role_texts={"judge": 5}), "the text of judge in its Outcome is 5"),
        (_agent_with(figures=[1]), "the figures of its Outcome is [1]"),
        (_agent_with(figures={"turns": "x"}), "the figure turns must be a number, but is 'x'"),
        (_agent_with(figures={"turns": float("nan")}), "the figure turns must be finite"),
        (_raises, 'raise KeyError("no such tool")'),
        (_silent, "without one call of session.generate"),
        (_forgets, "returned 'done' instead of an Outcome"),
        (_wordless, "the text of its Outcome is None"),
        (_nan, "the reward must be finite"),
        (_nan_turn, "the reward must be finite"),
        (_half_rewarded, "rewards of 1 turns, but there were 2"),
    ],
)
def test_what_an_agent_does_wrong_is_named(agent: Agent, why: str) -> None:
    with pytest.raises(AgentError) as caught:
        _play(agent)
    assert "`test` failed on prompt 3" in caught.value.what and why in caught.value.why
    assert "rollout/episode/episode.py" not in caught.value.why


def test_numbers_of_an_agent_become_floats_whatever_their_type() -> None:
    odd = _agent_with(
        reward=torch.tensor(1.0),
        turn_rewards=np.array([0.25]),
        role_rewards={"judge": Decimal("0.5")},
        figures={"won": np.bool_(True)},
    )
    sample = _play(odd)
    numbers = [sample.reward, sample.role_rewards["judge"], sample.figures["won"]]
    assert numbers == [1.0, 0.5, 1.0] and {type(number) for number in numbers} == {float}


def test_rewards_of_turns_stand_at_their_last_tokens_and_their_sum_is_the_reward() -> None:
    async def solve(prompt: Prompt, session: Session) -> Outcome:
        first = await session.generate(prompt.token_ids)
        other = [9, *prompt.token_ids]  # answered out of order: another line
        late, middle = await asyncio.gather(
            session.generate(other),
            session.generate([*first.prompt_ids, *first.response_ids, 8]),
        )
        assert session.turns == [first, late, middle] or session.turns == [first, middle, late]
        worth = {id(first): 1.0, id(late): 2.0, id(middle): -0.5}
        return Outcome(text="", turn_rewards=[worth[id(turn)] for turn in session.turns])

    sample = _play(solve)
    assert sample.reward == 2.5
    one, two = sample.trajectories
    assert one.rewards is not None and one.rewards.tolist() == [0, 0, 1.0, 0, -0.5]
    assert two.rewards is not None and two.rewards.tolist() == [0, 0, 0, 2.0]
    assert list(one.loss_mask) == [0, 0, 1, 0, 1]


def test_a_bad_episode_is_played_anew_and_a_bad_agent_stops_the_run() -> None:
    told, seeds = list[str](), list[int]()

    def fails(times: int) -> Agent:
        async def solve(prompt: Prompt, session: Session) -> Outcome:
            turn = await session.generate(prompt.token_ids)
            seeds.append(turn.response_ids[0])
            if len(seeds) <= times:
                raise OSError("the tool's server is away")
            return Outcome(text=turn.text)

        return solve

    def play(times: int) -> Sample:
        seeds.clear()
        made = make_episodes(ScriptedEngine(), agent=fails(times))
        episodes = replace(made, retries=2, tell=told.append)
        return asyncio.run(episodes.play(PROMPT, sample_index=0, seed=47))

    assert play(0).num_failed == 0 and not told
    sample = play(2)
    assert sample.num_failed == 2 and len(told) == 2 and "server is away" in told[0]
    assert sample.seed not in (47,) and len(set(seeds)) > 1
    assert play(2) == sample, "the same seeds again"
    with pytest.raises(AgentError, match="failed on prompt 3") as caught:
        play(9)
    assert "it failed 3 times, the last so:" in caught.value.why
    assert "server is away" in caught.value.why


def test_an_agent_is_checked_before_a_device_is_taken() -> None:
    with pytest.raises(RecipeError, match="no agent `singel_turn`") as caught:
        load_agent(Rollout(agent="singel_turn"))
    assert caught.value.fixes == ["--set rollout.agent=single_turn"]
    with pytest.raises(RecipeError, match="cannot be an agent"):
        load_agent(Rollout(agent="tests.rollout.episode.test_episode:lacking"))


async def lacking(prompt: Prompt) -> Outcome:
    """No session."""
    return Outcome(text="")
