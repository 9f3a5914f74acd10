"""Evaluations, on an engine in memory; on real ones in tests/end_to_end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from milescli.core.errors import WaitTimeout
from milescli.core.types import Prompt
from milescli.rollout.base import Agent, Outcome, Session
from milescli.runtime.evaluator import Evaluator
from tests.rollout.engines import ScriptedEngine, make_episodes, make_recipe, make_source


def _evaluator(folder: Path, agent: Agent, *, timeout_s: float = 60.0) -> Evaluator:
    return Evaluator(
        recipe=make_recipe(timeout_s=timeout_s),
        prompts=[prompt for _, prompt in make_source().take(4)],
        episodes=make_episodes(ScriptedEngine(), agent=agent),
        folder=folder / "eval",
    )


async def _index(prompt: Prompt, session: Session) -> Outcome:
    await session.generate(prompt.token_ids)
    return Outcome(text=str(prompt.index))


def test_every_prompt_is_scored_and_kept(tmp_path: Path) -> None:
    done = asyncio.run(_evaluator(tmp_path, _index).run(3))
    assert (done.step, done.num_prompts, done.accuracy) == (3, 4, 1.5)
    rows = [json.loads(line) for line in (tmp_path / "eval" / "step_3.jsonl").open()]
    assert [row["reward"] for row in rows] == [0, 1, 2, 3]
    assert [len(row["response_ids"]) for row in rows] == [1, 1, 1, 1]


async def _hangs_on_2(prompt: Prompt, session: Session) -> Outcome:
    outcome = await _index(prompt, session)
    if prompt.index == 2:
        await asyncio.Event().wait()
    return outcome


def test_an_agent_that_hangs_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with pytest.raises(WaitTimeout) as waited:
        asyncio.run(_evaluator(tmp_path, _hangs_on_2, timeout_s=0.2).run(0))
    assert "3 of 4 were done" in waited.value.why and "prompt 2 is the first" in waited.value.why
    assert "the agent `test`" in waited.value.fixes[-1]


async def _slowly(prompt: Prompt, session: Session) -> Outcome:
    await asyncio.sleep(0.8 * prompt.index)
    return await _index(prompt, session)


def test_an_evaluation_may_take_longer_than_its_bound_while_samples_come(tmp_path: Path) -> None:
    done = asyncio.run(_evaluator(tmp_path, _slowly, timeout_s=2.0).run(0))
    assert done.num_prompts == 4
