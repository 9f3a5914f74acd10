"""The agent that plays in environments, and the processes that they live in: what the policy is
shown, what turns are worth, and that one which hangs or dies costs its own episode alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from milescli.agents.environment import EnvironmentAgent, try_environment
from milescli.agents.environment_fleet import EnvironmentFleet, OtherNode
from milescli.core.errors import AgentError, ContextFull, RecipeError
from milescli.core.types import Prompt, StopReason
from milescli.recipe.agents import EnvironmentSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Reply, Turn
from milescli.rollout.environment_contract import check_environment
from milescli.rollout.environments import Step
from milescli.workers.async_worker import QuickCalls
from tests.waiting import until_async

HERE = "tests.agents.user_environments"


class Session:
    """A policy that says what it is told to."""

    def __init__(self, says: Sequence[str | Exception]) -> None:
        self.says = list(says)
        self.asked: list[list[dict[str, Any]]] = []
        self.turns: list[Turn] = []

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Reply:
        """See milescli.rollout.base.Session."""
        self.asked.append([dict(message) for message in messages])
        said = self.says[len(self.turns)]
        if isinstance(said, Exception):
            raise said
        turn = Turn(prompt_ids=[1], response_ids=[2], text=said, stop_reason=StopReason.STOP)
        self.turns.append(turn)
        return Reply(turn=turn, message={"role": "assistant", "content": said})


def _settings(name: str, *, step_timeout_s: float = 20.0, **settings: Any) -> EnvironmentSettings:
    return EnvironmentSettings(
        name=f"{HERE}:{name}", settings=settings, step_timeout_s=step_timeout_s, processes=1
    )


def _played(
    session: Session, settings: EnvironmentSettings, *, max_turns: int = 8, label: str = "7"
) -> Outcome:
    prompt = Prompt(
        index=3,
        token_ids=[1],
        text="a number",
        label=label,
        turns=[{"role": "system", "content": "Play."}, {"role": "user", "content": "a number"}],
    )

    async def play() -> Outcome:
        agent = EnvironmentAgent(
            Rollout(agent="environment", environment=settings, max_turns=max_turns)
        )
        try:
            return await agent(prompt, session)  # type: ignore[arg-type]
        finally:
            agent.fleet.close()

    return asyncio.run(play())


def test_turns_are_actions_and_observations_are_messages() -> None:
    session = Session(["a", "bb", "ccc"])
    outcome = _played(session, _settings("Count"))
    assert session.asked[0] == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "begin 7"},
    ]
    said = [(message["role"], message["content"]) for message in session.asked[2][2:]]
    assert said == [("assistant", "a"), ("user", "a"), ("assistant", "bb"), ("user", "a bb")]
    assert outcome.turn_rewards == [1.0, 2.0, 3.0] and outcome.reward is None
    assert not outcome.is_cut and outcome.text == "a\nbb\nccc"
    assert outcome.figures["said"] == 3.0 and outcome.figures["environment_s"] > 0


def test_observations_show_images() -> None:
    session = Session(["a", "bb"])
    _played(session, _settings("Pictures"), max_turns=2)
    (picture,) = session.asked[0][1]["content"]
    text, other = session.asked[1][-1]["content"]
    assert text == {"type": "text", "text": "a"}
    assert picture["image_url"]["url"].startswith("data:image/png;base64,") and picture != other
    assert check_environment(f"{HERE}:Pictures", actions=["x"]).first == "<image>"
    with pytest.raises(AgentError, match="Pictures` failed") as caught:
        _played(Session(["cut"]), _settings("Pictures"))
    assert "an image file cannot be read" in caught.value.why


def test_an_episode_that_does_not_end_is_cut() -> None:
    outcome = _played(Session(["a", "b"]), _settings("Count"), max_turns=2)
    assert outcome.is_cut and outcome.turn_rewards == [1.0, 1.0]
    full = ContextFull("full", why="it is", fix="more")
    outcome = _played(Session(["a", full]), _settings("Count"))
    assert outcome.is_cut and outcome.turn_rewards == [1.0]
    with pytest.raises(ContextFull):
        _played(Session([full]), _settings("Count"))


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("none", "not a Step"),
        ("tuple", "not a Step"),
        ("nan", "not a finite number"),
        ("bytes", "not one of PNG"),
        ("text", "not a finite number"),
        ("raise", "ZeroDivisionError: of the environment"),
    ],
)
def test_what_is_no_step_is_named(says: str, told: str) -> None:
    with pytest.raises(AgentError) as caught:
        _played(Session([says]), _settings("Wrong"))
    assert f"{HERE}:Wrong" in caught.value.what and told in caught.value.why
    assert f"miles env check {HERE}:Wrong" in caught.value.fixes[0]


def test_settings_that_it_does_not_take_are_told() -> None:
    with pytest.raises(RecipeError) as caught:
        _played(Session(["a"]), _settings("Count", size=3))
    assert "size" in caught.value.why and "(length)" in caught.value.why


def test_one_that_cannot_begin_is_refused_before_a_run_does() -> None:
    prompt = Prompt(index=0, token_ids=[1], text="", label="4")
    try_environment(_settings("Count"), prompt)
    with pytest.raises(RecipeError, match="does not accept its settings"):
        try_environment(_settings("Count", size=3), prompt)
    broken = EnvironmentSettings(
        name="milescli.agents.frozen_lake:FrozenLake", settings={"size": 1}, processes=1
    )
    with pytest.raises(RecipeError, match=r"the environment `.*FrozenLake` failed") as caught:
        try_environment(broken, prompt)
    assert "has no space for 2 holes" in caught.value.why


async def _episode(
    fleet: EnvironmentFleet, seed: int, says: Sequence[str], told: list[str] | None = None
) -> list[Step]:
    async with fleet.episode("", str(seed), seed) as episode:
        assert await episode.reset() == f"begin {seed}"
        steps = []
        for said in says:
            steps.append(await episode.step(said))
            if told is not None:
                told.append(said)
            await asyncio.sleep(0.1)
        return steps


def test_one_that_hangs_is_named_and_costs_its_own_episode_alone() -> None:
    async def play() -> tuple[AgentError, list[list[Step]], int]:
        settings = _settings("Hangs", step_timeout_s=8.0, length=200)
        fleet = EnvironmentFleet(settings, num_processes=1)
        others = [["x"] * 100 for _ in range(3)]
        await _episode(fleet, 9, ["warm"])  # the first call is given more time
        calls = [_episode(fleet, seed, says) for seed, says in enumerate(others)]
        hung = asyncio.ensure_future(_episode(fleet, 8, ["a", "hang"]))
        done = await asyncio.gather(*calls)
        try:
            await hung
        except AgentError as error:
            return error, done, fleet.num_hung
        finally:
            fleet.close()
        raise AssertionError("it did not hang")

    error, done, num_hung = asyncio.run(play())
    assert "did not respond within 8 s" in error.what and num_hung == 1
    assert "told 'hang'" in error.why and "in hang_here" in error.why
    for steps in done:  # in a new process, as if nothing had been
        assert [step.figures["said"] for step in steps] == list(range(1, 101))
        assert steps[-1].observation == " ".join(["x"] * 100)


def test_what_was_done_in_a_process_that_died_is_done_again(tmp_path: Path) -> None:
    async def play() -> list[Step]:
        settings = _settings("Dies", once=str(tmp_path / "once"))
        fleet = EnvironmentFleet(settings, num_processes=1)
        try:
            return await _episode(fleet, 5, ["a", "die", "b"])
        finally:
            fleet.close()

    steps = asyncio.run(play())
    assert [step.observation for step in steps] == ["a", "a die", "a die b"]


def test_many_play_at_once_and_nothing_is_left(tmp_path: Path) -> None:
    async def play() -> list[list[Step]]:
        fleet = EnvironmentFleet(_settings("Count", length=4), num_processes=1)
        calls = [_episode(fleet, seed, [str(seed)] * 4) for seed in range(200)]
        try:
            return await asyncio.gather(*calls)
        finally:
            fleet.close()

    before = len(os.listdir("/proc/self/fd"))
    for seed, steps in enumerate(asyncio.run(play())):
        assert steps[-1].ended and steps[-1].observation == " ".join([str(seed)] * 4)
    assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_a_process_that_is_stopped_is_replaced_and_nobody_fails() -> None:
    async def play() -> tuple[list[list[Step]], int]:
        fleet = EnvironmentFleet(_settings("Count", length=40, step_timeout_s=8.0), num_processes=1)
        await _episode(fleet, 9, ["warm"])
        told: list[str] = []
        calls = [
            asyncio.ensure_future(_episode(fleet, seed, ["x"] * 40, told)) for seed in range(20)
        ]
        await until_async(lambda: len(told) > 100)
        (stopped,) = fleet.pids
        os.kill(stopped, signal.SIGSTOP)
        try:
            done = await asyncio.gather(*calls)
            assert fleet.pids != [stopped] and not Path(f"/proc/{stopped}").exists()
            return done, fleet.num_hung
        finally:
            fleet.close()

    done, num_hung = asyncio.run(play())
    assert num_hung == 0 and all(steps[-1].ended and len(steps) == 40 for steps in done)


def test_episodes_are_dealt_to_the_least_busy_process_of_all_nodes() -> None:
    async def nodes() -> list[str]:
        settings = EnvironmentSettings(name=f"{HERE}:Count")
        fleet = EnvironmentFleet(settings, num_processes=1)
        fleet.spread([OtherNode(name="node X", num_cores=4, process=QuickCalls)])
        async with contextlib.AsyncExitStack() as playing:
            begun = [await playing.enter_async_context(fleet.episode("", "1", 1)) for _ in range(6)]
            dealt = [episode.place.node for episode in begun]
        fleet.leave_nodes()
        async with fleet.episode("", "1", 1), fleet.episode("", "1", 1) as last:
            return [*dealt, last.place.node]

    assert asyncio.run(nodes()) == ["", "node X", "node X"] * 2 + [""]
