"""Agents of the user's play in a process of their own: tokens are recorded exactly, and what they
do wrong is bounded and named."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from milescli.core import user_code
from milescli.core.errors import AgentError, WorkerDied
from milescli.core.types import Prompt, Sample
from milescli.recipe.schema import Rollout
from milescli.rollout.base import GenerateRequest
from milescli.rollout.episode.agent_process import AgentProcess
from milescli.rollout.episode.episode import load_agent
from tests.rollout.engines import ScriptedEngine, make_episodes
from tests.waiting import until_async

ROOM = "tests.rollout.episode.bad_agents"
PROMPT = Prompt(index=3, token_ids=[1, 2], text="how many?", label="0")


def _died(request: GenerateRequest) -> Exception | None:
    if list(request.prompt_ids) != [13]:
        return None
    return WorkerDied("engine 0 ended", why="it was killed", fix="resume")


async def _played(name: str, *, num: int = 1, prompt: Prompt = PROMPT) -> list[Sample]:
    agent = load_agent(Rollout(agent=f"{ROOM}:{name}", reward_memory_gib=2.0))
    assert isinstance(agent, AgentProcess)
    engine = ScriptedEngine(delay=lambda request: request.seed % 7)
    engine.fail_on = _died
    episodes = make_episodes(engine, agent=agent)
    calls = [episodes.play(prompt, sample_index=n, seed=40 + n) for n in range(num)]
    try:
        return await asyncio.gather(*calls)
    finally:
        agent.close()


def _play(name: str, *, num: int = 1) -> list[Sample]:
    return asyncio.run(asyncio.wait_for(_played(name, num=num), 120))


def test_its_turns_become_one_exact_line() -> None:
    samples = _play("good", num=20)
    assert [sample.sample_index for sample in samples] == list(range(20))
    for n, sample in enumerate(samples):
        (line,) = sample.trajectories
        first, second = sample.response_ids
        assert list(line.token_ids) == [1, 2, first, second] and first == (40 + n) % 10
        assert list(line.loss_mask) == [0, 0, 1, 1]
        assert sample.text == f"{first}{second}" and sample.reward == float(sample.text)


def test_it_may_ask_several_times_at_once_and_is_elsewhere() -> None:
    (sample,) = _play("at_once")
    assert len(sample.trajectories) == 5
    assert sample.reward != os.getpid()


def test_it_can_live_with_what_is_refused_it() -> None:
    (sample,) = _play("patient")
    assert sample.num_loss_tokens == 1


def test_what_the_engine_raises_is_not_its_fault() -> None:
    with pytest.raises(WorkerDied, match="engine 0 ended"):
        _play("careless")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raising", "bad_agents.py"),
        ("returning", "returned 'done' instead of an Outcome"),
        ("silent", "without one call of session.generate"),
        ("leaving", "its process ended with exit code 7"),
        ("greedy", "MemoryError"),
        ("confused", "these are not token ids"),
    ],
)
def test_what_it_does_wrong_is_named(name: str, said: str) -> None:
    with pytest.raises(AgentError, match="prompt 3") as refused:
        _play(name, num=3)
    assert said in refused.value.why


def test_one_that_holds_its_event_loop_up_ends_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_code, "BOUND_S", 1.0)
    with pytest.raises(AgentError) as refused:
        _play("blocking", num=2)
    assert "it held its event loop up for 1 s" in refused.value.why
    assert "bad_agents.py" in refused.value.why and "in blocking" in refused.value.why


def test_an_episode_that_nobody_waits_for_is_cancelled_there(tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    prompt = Prompt(index=0, token_ids=[1], text=str(tmp_path), label="0")

    async def run() -> None:
        agent = load_agent(Rollout(agent=f"{ROOM}:waiting", reward_memory_gib=2.0))
        episodes = make_episodes(ScriptedEngine(), agent=agent)
        playing = asyncio.create_task(episodes.play(prompt, sample_index=0, seed=1))
        await until_async(begun.exists)
        playing.cancel()
        await until_async(ended.exists)
        assert isinstance(agent, AgentProcess)
        agent.close()

    asyncio.run(run())
