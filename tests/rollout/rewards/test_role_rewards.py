"""Rewards that roles have of their own: asked of what a role said, and told as figures."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from milescli.core.errors import AgentError
from milescli.core.types import Prompt, Sample
from milescli.recipe.agents import Role
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Session
from milescli.rollout.collect.selectors import has_zero_variance
from milescli.rollout.rewards import needs_label, role_scorers_of
from milescli.rollout.rewards.role_rewards import RoleScorer
from milescli.rollout.rewards.scoring import Score, Scoring
from tests.rollout.engines import ScriptedEngine, make_episodes, make_scorer
from tests.samples import make_group

PROMPT = Prompt(index=3, token_ids=[1, 2], text="how many?", label="0")


async def _minus(*, prompt: str, response: str, label: str | None) -> float:
    return -float(response)


class _Ranks:
    """Scores all responses to a prompt at once: by their order."""

    scores_groups = True

    def of(self, prompt: Prompt) -> Scoring:
        """See Scoring."""
        return self  # type: ignore[return-value]

    async def score_responses(self, prompt: Prompt, responses: list[Any]) -> list[Score]:
        """See Scoring."""
        return [Score(reward=float(place)) for place in range(len(responses))]


async def _debate(prompt: Prompt, session: Session) -> Outcome:
    """The episode's text is `contra`'s."""
    texts = [(await session.generate([place, *prompt.token_ids])).text for place in (5, 6)]
    told = dict(zip(("pro", "contra"), texts, strict=True))
    return Outcome(text=texts[1], turn_roles=["pro", "contra"], role_texts=told)


def _play(roles: dict[str, Any], count: int = 1, **changes: Any) -> list[Sample]:
    scorer = RoleScorer(make_scorer(), roles)
    episodes = replace(
        make_episodes(ScriptedEngine(), agent=changes.pop("agent", _debate)),
        scorer=scorer,
        **changes,
    )

    async def play() -> list[Sample]:
        samples = [
            await episodes.play(PROMPT, sample_index=index, seed=47 + index)
            for index in range(count)
        ]
        return await episodes.score_samples(PROMPT, samples)

    return asyncio.run(play())


def test_a_roles_reward_scores_what_it_said_and_is_a_figure() -> None:
    (sample,) = _play({"pro": make_scorer(_minus)})
    pro, contra = (line.token_ids[-1] for line in sample.trajectories)
    assert sample.reward == contra and sample.role_rewards == {"pro": -pro}
    assert sample.figures["pro_reward"] == -pro and "contra_reward" not in sample.figures
    assert [line.role for line in sample.trajectories] == ["pro", "contra"]


def test_a_role_can_be_scored_with_all_samples_of_its_prompt_at_once() -> None:
    samples = _play({"pro": _Ranks(), "contra": make_scorer(_minus)}, count=3)
    assert [sample.role_rewards["pro"] for sample in samples] == [0.0, 1.0, 2.0]
    assert all("contra" in sample.role_rewards for sample in samples)
    equal = [replace(sample, reward=1.0) for sample in samples]
    assert not has_zero_variance(make_group(equal)), "a role's rewards differ"
    assert has_zero_variance(make_group([replace(one, role_rewards={}) for one in equal]))


def test_an_agent_may_know_the_rewards_of_its_roles() -> None:
    async def solve(prompt: Prompt, session: Session) -> Outcome:
        outcome = await _debate(prompt, session)
        return replace(outcome, role_rewards={"pro": 1.0, "contra": -1.0})

    (sample,) = _play({"pro": make_scorer(_minus)}, agent=solve)
    assert sample.role_rewards == {"pro": 1.0, "contra": -1.0}


def test_what_a_role_that_is_not_trained_says_is_recorded_and_not_learned() -> None:
    (sample,) = _play({}, untrained_roles=frozenset({"pro"}))
    pro, contra = sample.trajectories
    assert pro.num_loss_tokens == 0 and contra.num_loss_tokens == 1
    assert len(sample.version_spans) == 2, "what is learned depends on both"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"turn_roles": ["pro"]}, "roles of 1 turns, but there were 2"),
        ({"role_rewards": {"pro": float("inf")}}, "the reward of pro must be finite"),
    ],
)
def test_what_an_agent_says_wrong_of_roles_is_named(change: dict[str, Any], why: str) -> None:
    async def solve(prompt: Prompt, session: Session) -> Outcome:
        return replace(await _debate(prompt, session), **change)

    with pytest.raises(AgentError) as caught:
        _play({}, agent=solve)
    assert why in caught.value.why


def test_rewards_of_roles_are_made_as_those_of_the_episode() -> None:
    roles = {"pro": Role(reward={"gsm8k": 1.0}), "contra": Role(reward={"gsm8k": -1.0})}
    rollout = Rollout(agent="multi_agent", roles={**roles, "host": Role()}, reward="none")
    scorers = role_scorers_of(rollout)
    assert list(scorers) == ["pro", "contra"] and needs_label(rollout)
    label = replace(PROMPT, label="4")
    samples = [
        Sample(
            sample_index=0,
            seed=0,
            trajectories=[],
            text="",
            stop_reason="stop",  # type: ignore[arg-type]
            reward=0.0,
            role_texts={"pro": "#### 4", "contra": "#### 4"},
        )
    ]
    episodes = replace(make_episodes(ScriptedEngine()), scorer=RoleScorer(make_scorer(), scorers))
    (scored,) = asyncio.run(episodes.score_samples(label, samples))
    assert scored.role_rewards == {"pro": 1.0, "contra": -1.0}
