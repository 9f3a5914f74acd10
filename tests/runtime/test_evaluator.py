"""Evaluations, on an engine in memory; on real ones in tests/end_to_end."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from milescli.core.errors import RecipeError, WaitTimeout
from milescli.core.types import Prompt
from milescli.rollout.base import Agent, Outcome, Session
from milescli.runtime.evaluator import Evaluator
from tests.rollout.engines import ScriptedEngine, make_episodes, make_recipe, make_source


def _evaluator(
    folder: Path, agent: Agent, *, timeout_s: float = 60.0, function: str = "all"
) -> Evaluator:
    recipe = make_recipe(timeout_s=timeout_s)
    evaluation = recipe.eval.model_copy(update={"function": function})
    return Evaluator(
        recipe=recipe.model_copy(update={"eval": evaluation}),
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
        asyncio.run(_evaluator(tmp_path, _hangs_on_2, timeout_s=3.0).run(0))
    assert "3 of 4 were done" in waited.value.why and "prompt 2 is the first" in waited.value.why
    assert "the agent `test`" in waited.value.fixes[-1]


async def _slowly(prompt: Prompt, session: Session) -> Outcome:
    await asyncio.sleep(2.0 * prompt.index)
    return await _index(prompt, session)


def test_an_evaluation_may_take_longer_than_its_bound_while_samples_come(tmp_path: Path) -> None:
    done = asyncio.run(_evaluator(tmp_path, _slowly, timeout_s=5.0).run(0))
    assert done.num_prompts == 4


async def twice_the_last(*, prompts: Any, play: Any, settings: Any) -> Any:
    """One sample of each prompt, two of the last."""
    rows = [[await play(place)] for place in range(len(prompts))]
    rows[-1].append(await play(len(prompts) - 1, 1))
    return rows


async def waiting(*, prompts: Any, play: Any, settings: Any) -> Any:
    """For what never comes."""
    await asyncio.Event().wait()


async def leaving(*, prompts: Any, play: Any, settings: Any) -> Any:
    """In the middle."""
    await play(0)
    os._exit(3)


def test_an_evaluation_of_the_users_takes_the_samples_that_it_likes(tmp_path: Path) -> None:
    own = f"{__name__}:twice_the_last"
    done = asyncio.run(_evaluator(tmp_path, _index, function=own).run(3))
    assert (done.num_prompts, done.accuracy) == (4, (0 + 1 + 2 + 3 + 3) / 5)
    assert len((tmp_path / "eval" / "step_3.jsonl").read_text().splitlines()) == 5


def test_one_that_plays_nothing_is_not_waited_for_without_end(tmp_path: Path) -> None:
    own = f"{__name__}:waiting"
    with pytest.raises(WaitTimeout) as waited:
        asyncio.run(_evaluator(tmp_path, _index, function=own, timeout_s=3.0).run(0))
    assert "0 of 0 were done" in waited.value.why and "missing" not in waited.value.why


def test_one_that_ends_its_process_is_named(tmp_path: Path) -> None:
    own = f"{__name__}:leaving"
    with pytest.raises(RecipeError, match=f"the evaluation `{own}` failed") as refused:
        asyncio.run(_evaluator(tmp_path, _index, function=own).run(0))
    assert "exit code 3" in refused.value.why
