"""Evaluations, on an engine in memory; on real ones in tests/end_to_end."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import AgentError, RecipeError, RewardError, WaitTimeout
from milescli.core.types import EVALUATION, Prompt, WeightVersion
from milescli.rollout.base import Agent, Outcome, Session
from milescli.runtime.devices import Devices
from milescli.runtime.evaluation.evaluator import ConcurrentEvaluations, Evaluator, measure_set
from milescli.runtime.evaluation.results import read_result, sha256_of_prompts
from milescli.runtime.evaluation.sets import EvalSet, LoadedSet
from tests.rollout.engines import ScriptedEngine, make_episodes, make_recipe, make_source
from tests.runtime.recording.recorder import Recorder
from tests.waiting import settled


def _evaluator(
    folder: Path,
    agent: Agent,
    *,
    timeout_s: float = 60.0,
    function: str = "all",
    tell: Callable[[str], None] | None = None,
    **rollout: object,
) -> Evaluator:
    recipe = make_recipe(timeout_s=timeout_s, **rollout)
    evaluation = recipe.eval.model_copy(update={"function": function})
    return Evaluator(
        recipe=recipe.model_copy(update={"eval": evaluation}),
        prompts=[prompt for _, prompt in make_source().take(4)],
        episodes=make_episodes(ScriptedEngine(), agent=agent),
        folder=folder / "eval",
        tell=tell,
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


def test_a_prompt_of_which_a_sample_cannot_be_scored_is_excluded(tmp_path: Path) -> None:
    async def fails_on_2(prompt: Prompt, session: Session) -> Outcome:
        if prompt.index == 2:
            raise ConnectionError("the environment is away")
        return await _index(prompt, session)

    told: list[str] = []
    evaluator = _evaluator(tmp_path, fails_on_2, tell=told.append, max_unscored_share=0.25)
    done = asyncio.run(evaluator.run(3))
    assert (done.num_prompts, done.accuracy) == (3, 4 / 3)
    assert done.figures["unscored_prompts"] == 1.0
    rows = [json.loads(line) for line in (tmp_path / "eval" / "step_3.jsonl").open()]
    assert [row["index"] for row in rows] == [0, 1, 3]
    assert len(told) == 1 and "the environment is away" in told[0]

    evaluator = _evaluator(tmp_path, fails_on_2, max_unscored_share=0.2)
    with pytest.raises(AgentError) as raised:
        asyncio.run(evaluator.run(3))
    assert "1 of 4 samples of the evaluation could not be scored" in raised.value.why


def test_a_result_names_the_prompts_that_were_not_scored_and_the_k_that_has_no_samples(
    tmp_path: Path,
) -> None:
    async def fails_on_2(prompt: Prompt, session: Session) -> Outcome:
        if prompt.index == 2:
            raise ConnectionError("the environment is away")
        return await _index(prompt, session)

    evaluator = _evaluator(tmp_path, fails_on_2, max_unscored_share=0.25)
    one = EvalSet(name="few", recipe=evaluator.recipe, ks=[1, 4], domain=None)
    loaded = LoadedSet(set=one, prompts=evaluator.prompts, domains={})
    told = io.StringIO()
    result = asyncio.run(
        measure_set(
            loaded,
            evaluator.episodes,
            run=RunDir(tmp_path),
            model="mine",
            output=Output(stderr=told),
        )
    )
    assert (result.num_prompts, result.num_asked, result.unscored) == (3, 4, [2])
    assert result.rewards_by_place() == {0: 0.0, 1: 1.0, 3: 3.0}
    assert result.data_sha256 == sha256_of_prompts(evaluator.prompts)
    assert "few: pass@4 cannot be computed" in " ".join(told.getvalue().split())
    assert read_result(tmp_path / "eval" / "few" / "step_0.json") == result


async def _hangs_on_2(prompt: Prompt, session: Session) -> Outcome:
    outcome = await _index(prompt, session)
    if prompt.index == 2:
        await asyncio.Event().wait()
    return outcome


def test_an_agent_that_hangs_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with pytest.raises(WaitTimeout) as waited:
        asyncio.run(_evaluator(tmp_path, _hangs_on_2, timeout_s=3.0).run(0))
    assert "3 of 4 are complete" in waited.value.why and "of prompt 2" in waited.value.why
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
    assert "0 of 0 are complete" in waited.value.why and "missing" not in waited.value.why


def test_one_that_ends_its_process_is_named(tmp_path: Path) -> None:
    own = f"{__name__}:leaving"
    with pytest.raises(RecipeError, match=f"the evaluation `{own}` failed") as refused:
        asyncio.run(_evaluator(tmp_path, _index, function=own).run(0))
    assert "exit code 3" in refused.value.why


def _beside(told: list[str], *, fails_at: int | None = None) -> ConcurrentEvaluations:
    async def measure(step: int) -> None:
        told.append(f"asked {step}")
        for _ in range(20):  # a trainer's step begins meanwhile
            await asyncio.sleep(0)
        if step == fails_at:
            raise RewardError("no score", why="planted", fix="none")
        told.append(f"done {step}")

    devices = Devices(
        shares_memory=False,
        trainer=Recorder("trainer", told),
        engines=Recorder("engines", told),
        fleet=EVALUATION,
    )
    return ConcurrentEvaluations(devices, measure, tell=told.append)


async def _begin(beside: ConcurrentEvaluations, step: int) -> None:
    await beside.begin(step, WeightVersion(step), verify=False)


PUBLISH = ["engines.pause", "trainer.publish", "engines.resume"]
FIRST = ["engines.pause", "trainer.connect_engines", "trainer.publish", "engines.resume"]


def test_weights_change_only_between_two_evaluations() -> None:
    told: list[str] = []

    async def work() -> None:
        beside = _beside(told)
        for step in (0, 2):
            await _begin(beside, step)
            await asyncio.sleep(0)
            told.append(f"trained {step + 1}")
        await beside.finish()

    asyncio.run(work())
    assert told == [
        *(*FIRST, "asked 0", "trained 1", "done 0"),
        *(*PUBLISH, "asked 2", "trained 3", "done 2"),
    ]


def test_a_failure_is_heard_of_while_the_run_goes_on() -> None:
    async def work() -> None:
        beside = _beside([], fails_at=2)
        await beside.probe()
        await _begin(beside, 2)
        await beside.probe()
        await settled()
        for heard in (beside.probe, beside.finish, lambda: _begin(beside, 4)):
            with pytest.raises(RewardError, match="no score"):
                await heard()
        await beside.drop()

    asyncio.run(work())


def test_what_is_dropped_says_nothing_more() -> None:
    told: list[str] = []

    async def work() -> None:
        beside = _beside(told)
        await _begin(beside, 1)
        await asyncio.sleep(0)
        await beside.drop()
        await beside.probe()
        await beside.finish()

    asyncio.run(work())
    assert told == [*FIRST, "asked 1"]


def test_one_whose_engines_died_is_given_up_and_the_next_goes_on() -> None:
    told: list[str] = []

    async def work() -> None:
        beside = _beside(told)
        await _begin(beside, 1)
        await asyncio.sleep(0)
        finishing = asyncio.ensure_future(beside.finish())
        await asyncio.sleep(0)
        beside.give_up()
        await finishing
        await _begin(beside, 2)
        await beside.finish()

    asyncio.run(work())
    assert told[len(FIRST) :] == [
        "asked 1",
        "the evaluation of step 1 was abandoned: its engines died",
        *(*PUBLISH, "asked 2", "done 2"),
    ]
