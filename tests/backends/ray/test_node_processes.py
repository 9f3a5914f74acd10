"""Environments in processes of a node's actor: what is played there is what is played here, and
neither one that hangs nor a process or an actor that dies costs the episodes of others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from milescli.agents.environment_fleet import EnvironmentFleet, OtherNode
from milescli.backends.ray import node_processes
from milescli.backends.ray.cluster import Cluster
from milescli.backends.ray.node_processes import MAX_LOST, NodeProcesses
from milescli.core.errors import AgentError, RecipeError, WorkerDied
from milescli.core.run_processes import processes_of
from milescli.recipe.agents import EnvironmentSettings
from milescli.rollout.environments import Step
from tests.waiting import until_async

HERE = "tests.agents.user_environments"
Use = Callable[[EnvironmentFleet], Awaitable[Any]]
TOLD: list[str] = []
"""What a user would be told."""


def _settings(name: str, *, step_timeout_s: float = 20.0, **settings: Any) -> EnvironmentSettings:
    return EnvironmentSettings(
        name=f"{HERE}:{name}", settings=settings, step_timeout_s=step_timeout_s, processes=1
    )


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all tests: each takes what actor there is, whoever began it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def node(session, runner) -> Iterator[NodeProcesses]:
    """This computer, as another node."""
    node = NodeProcesses(session[0], number=0, tell=TOLD.append, name="environments")
    assert runner.run(node.start(timeout_s=60)) == len(os.sched_getaffinity(0))
    yield node
    node.close()
    runner.run(session[0].kill_all(but=[]))


@pytest.fixture
def play(runner, node, session) -> Callable[..., Any]:
    """Run `use(fleet)` with a fleet of `here` processes beside this one, and of the recipe's on
    the node; nothing of it is left there."""
    TOLD.clear()

    def run(use: Use, settings: EnvironmentSettings, *, here: int = 0) -> Any:
        async def main() -> Any:
            fleet = EnvironmentFleet(settings, num_processes=here)
            fleet.spread([OtherNode(name="node X", num_cores=1, process=node.process)])
            try:
                return await use(fleet)
            finally:
                fleet.leave_nodes()
                fleet.close()
                await until_async(lambda: not _workers(session))

        return runner.run(main())

    return run


async def _episode(
    fleet: EnvironmentFleet, seed: int, says: list[str], told: list[str] | None = None
) -> list[Step]:
    async with fleet.episode("", str(seed), seed) as episode:
        assert await episode.reset() == f"begin {seed}"
        steps = []
        for said in says:
            steps.append(await episode.step(said))
            if told is not None:
                told.append(said)
            await asyncio.sleep(0.05)
        return steps


def _workers(session: tuple[Cluster, str, Path]) -> list[psutil.Process]:
    """The processes in which environments live, here and in actors."""
    workers = list[psutil.Process]()
    for pid in processes_of(session[1]):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            workers += [process] if "milescli.workers.child" in process.cmdline() else []
    return workers


def test_many_play_here_and_there_and_nothing_is_left(play, session) -> None:
    async def use(fleet: EnvironmentFleet) -> Any:
        played = await asyncio.gather(*(_episode(fleet, n, [str(n)] * 4) for n in range(200)))
        return played, [worker.ppid() for worker in _workers(session)]

    played, parents = play(use, _settings("Count", length=4), here=1)
    for seed, steps in enumerate(played):
        assert steps[-1].ended and steps[-1].observation == " ".join([str(seed)] * 4)
    assert len(parents) == 2 and parents.count(os.getpid()) == 1


def test_one_that_hangs_there_is_named_and_costs_its_own_episode_alone(play) -> None:
    async def use(fleet: EnvironmentFleet) -> Any:
        await _episode(fleet, 9, ["warm"])  # the first call is given more time
        calls = [_episode(fleet, seed, ["x"] * 190) for seed in range(3)]
        hung = asyncio.ensure_future(_episode(fleet, 8, ["a", "hang"]))
        done = await asyncio.gather(*calls)
        with pytest.raises(AgentError, match="did not respond within 8 s on node X") as caught:
            await hung
        assert fleet.num_hung == 1 and not TOLD
        return caught.value, done

    error, done = play(use, _settings("Hangs", step_timeout_s=8.0, length=200))
    assert "told 'hang'" in error.why and "in hang_here" in error.why
    for steps in done:  # in a new process, as if nothing had been
        assert [step.figures["said"] for step in steps] == list(range(1, 191))


def test_a_process_that_dies_there_costs_no_episode(play, tmp_path: Path) -> None:
    async def use(fleet: EnvironmentFleet) -> Any:
        others = [_episode(fleet, seed, ["x"] * 10) for seed in range(4)]
        steps, *done = await asyncio.gather(_episode(fleet, 5, ["a", "die", "b"]), *others)
        assert not TOLD
        return steps, done

    steps, done = play(use, _settings("Dies", once=str(tmp_path / "once")))
    assert [step.observation for step in steps] == ["a", "a die", "a die b"]
    assert all(steps[-1].observation == " ".join(["x"] * 10) for steps in done)


def test_an_actor_that_dies_costs_no_episode_and_is_replaced(play, session, node) -> None:
    async def use(fleet: EnvironmentFleet) -> Any:
        await _episode(fleet, 9, ["warm"])
        told: list[str] = []
        calls = [asyncio.ensure_future(_episode(fleet, n, ["x"] * 40, told)) for n in range(12)]
        await until_async(lambda: len(told) > 100)
        handle = (await node.actor()).handle
        [host] = {worker.ppid() for worker in _workers(session)} - {os.getpid()}
        os.kill(host, signal.SIGKILL)
        done = await asyncio.gather(*calls)
        assert len(TOLD) == 1 and "node 0 ended, and miles restarts them" in TOLD[0]
        await asyncio.gather(*(_episode(fleet, n, ["y"]) for n in range(4)))
        assert (await node.actor()).handle is not handle
        return done

    for steps in play(use, _settings("Count", length=40), here=1):
        assert steps[-1].ended and [step.figures["said"] for step in steps] == list(range(1, 41))


def test_a_node_that_cannot_make_it_is_named(play) -> None:
    async def use(fleet: EnvironmentFleet) -> None:
        with pytest.raises(RecipeError, match="does not accept its settings on node X"):
            await _episode(fleet, 1, ["a"])

    play(use, _settings("Count", size=3))


def test_actors_that_never_start_end_the_run(play, session, node, monkeypatch) -> None:
    async def use(fleet: EnvironmentFleet) -> None:
        handle = (await node.actor()).handle
        assert handle is not None
        await session[0].kill([handle])
        monkeypatch.setattr(node_processes, "PROCESS_HOST", "tests.backends.ray.toys:Nobody")
        with pytest.raises(WorkerDied, match=f"ended {MAX_LOST} times in a row") as caught:
            await _episode(fleet, 1, ["a"])
        assert "has no attribute 'Nobody'" in caught.value.why and len(TOLD) == MAX_LOST - 1
        assert Path(caught.value.fixes[0].removeprefix("less ")).exists()

    play(use, _settings("Count"))
