"""Ray as the runtime uses it: bounded named calls, whole errors, first causes, loopback only, and
nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from milescli.backends.ray.actor import ActorHandle, run_all, start_all
from milescli.backends.ray.cluster import Cluster
from milescli.core.errors import DataError, FitError, WaitTimeout, WorkerDied
from milescli.core.run_processes import processes_of
from milescli.plan.types import Slot
from tests.backends.ray.toys import Traveller
from tests.plans import PLAN

TOY = "tests.backends.ray.toys:Toy"


async def _toys(cluster: Cluster, *names: str) -> list[ActorHandle]:
    toys = [
        await cluster.spawn(
            name, TOY, node=0, kwargs={"number": index}, environment={"MILES_TEST": name}
        )
        for index, name in enumerate(names)
    ]
    await start_all(toys, timeout_s=60)
    return toys


@pytest.fixture
def with_toys(session):
    """Run `use(cluster, toys)` with freshly made actors of the names given; they are killed
    afterwards."""

    def run(names: list[str], use):
        async def main():
            toys = await _toys(session[0], *names)
            try:
                return await use(session[0], toys)
            finally:
                await session[0].kill(toys)

        return asyncio.run(main())

    return run


def test_calls_return_values_and_write_to_a_log_of_their_own(with_toys) -> None:
    async def use(cluster, toys):
        assert await run_all(toys, "add", 10, timeout_s=120) == [10, 11]
        assert await run_all(toys, "total", await cluster.put([1, 2, 3]), timeout_s=120) == [6, 6]
        assert await toys[1].run("environment", "MILES_TEST", timeout_s=120) == "rank 1"
        assert toys[0].log_path.name == "rank-0.log"
        assert "adding" in toys[0].log_path.read_text()

    with_toys(["rank 0", "rank 1"], use)


def test_what_it_is_made_of_is_unpickled_where_it_is_imported(session) -> None:
    """Two threads that import parts of one package may each see half of it."""
    cluster, *_ = session

    async def use() -> None:
        given = {"number": 1, "traveller": Traveller()}
        toy = await cluster.spawn("arrived", TOY, node=0, kwargs=given, environment={})
        try:
            await toy.start(timeout_s=60)
            unpickler, worker = await toy.run("arrived", timeout_s=120)
            assert unpickler == worker
        finally:
            await cluster.kill([toy])

    asyncio.run(use())


def test_a_process_that_was_started_ahead_is_the_one_that_is_spawned(session) -> None:
    cluster, _, log_dir = session

    async def use() -> None:
        cluster.spawn_ahead("early", TOY, environment={})
        [waiting] = cluster._ahead.values()
        early = await cluster.spawn("early", TOY, node=0, kwargs={"number": 5}, environment={})
        try:
            assert early.actor is waiting and not cluster._ahead
            await early.start(timeout_s=60)
            assert await early.run("add", 10, timeout_s=120) == 15
            assert "adding" in (log_dir / "early.log").read_text()
        finally:
            await cluster.kill([early])

    asyncio.run(use())


def test_nobody_to_call_is_no_error() -> None:
    assert asyncio.run(run_all([], "add", timeout_s=1)) == []
    assert asyncio.run(start_all([], timeout_s=1)) == []


def test_an_explained_error_arrives_whole(with_toys) -> None:
    async def use(_, toys):
        with pytest.raises(DataError) as caught:
            await toys[0].run("refuse", timeout_s=120)
        assert (caught.value.what, caught.value.why, caught.value.fixes) == (
            "row 7 is broken",
            "no JSON",
            ["fix it"],
        )

    with_toys(["explainer"], use)


def test_an_unexplained_error_names_who_what_and_where(with_toys) -> None:
    async def use(_, toys):
        with pytest.raises(WorkerDied, match="breaker failed in `break_down`") as caught:
            await toys[0].run("break_down", timeout_s=120)
        assert "KeyError: 'weights'" in caught.value.why
        assert "toys.py" in caught.value.why

    with_toys(["breaker"], use)


def test_a_wait_ends_at_its_bound_and_says_who_does_what(with_toys) -> None:
    async def use(_, toys):
        with pytest.raises(WaitTimeout, match="waited 1 s for sleeper to finish `sleep`") as caught:
            await toys[0].run("sleep", 30, timeout_s=1)
        assert "in `sleep` for" in caught.value.why

    with_toys(["sleeper"], use)


def test_a_wait_that_ended_in_the_actor_is_not_taken_for_ours(with_toys) -> None:
    async def use(_, toys):
        with pytest.raises(WaitTimeout, match="an engine did not answer") as caught:
            await toys[0].run("wait_in_vain", timeout_s=120)
        assert caught.value.why == "waited 600 s"

    with_toys(["waiter"], use)


def test_a_killed_rank_is_the_cause_and_its_peers_are_symptoms(with_toys) -> None:
    async def use(_, toys):
        pids = await run_all(toys, "pid", timeout_s=120)
        calls = asyncio.ensure_future(run_all(toys, "lose_peer", pids[1], timeout_s=600))
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="victim died during `lose_peer`"):
            await calls

    with_toys(["survivor", "victim"], use)


def test_a_plan_that_the_cluster_cannot_hold_is_refused_within_its_bound(session) -> None:
    cluster = Cluster(
        address=None,
        temp_dir=Path("/nowhere"),
        environment={},
        nodes=session[0].nodes,
    )
    wide = replace(
        PLAN, slots=[Slot(node=0, device=index, trainer_rank=index) for index in range(64)]
    )
    with pytest.raises(FitError, match="did not provide 64 device slots"):
        asyncio.run(cluster.place(wide, timeout_s=2))


def test_nothing_listens_beyond_loopback(session, with_toys) -> None:
    async def use(_, toys):
        [worker] = await run_all(toys, "pid", timeout_s=120)
        return worker, set(processes_of(session[1])), psutil.net_connections(kind="inet")

    worker, ours, sockets = with_toys(["listener"], use)
    listening = [
        socket for socket in sockets if socket.status == psutil.CONN_LISTEN and socket.pid in ours
    ]
    assert worker in ours and len(ours) > 2, "the session has Ray's two servers and a worker"
    assert {socket.pid for socket in listening} > {worker}, "servers and worker take connections"
    assert not [socket for socket in listening if not _is_loopback(socket.laddr.ip)]


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def test_what_a_process_starts_itself_ends_with_it_and_secrets_are_in_its_memory(session) -> None:
    cluster, *_ = session

    async def use() -> None:
        parent = await cluster.spawn(
            "parent",
            f"{TOY[:-3]}Parent",
            node=0,
            num_cpus=0.0,
            kwargs={"cluster": cluster},
            environment={},
        )
        try:
            pid = await parent.start(timeout_s=60, secrets={"MY_TOKEN": "not-for-everybody"})
            child = psutil.Process(await parent.run("spawn", TOY, timeout_s=120))
            assert await parent.run("environment", "MY_TOKEN", timeout_s=120) == "not-for-everybody"
            for process in (psutil.Process(pid), child):
                assert "MY_TOKEN" not in process.environ()
                assert "not-for-everybody" not in " ".join(process.cmdline())
            assert "not-for-everybody" not in repr(parent)
            files = [file for file in cluster.temp_dir.rglob("*") if file.is_file()]
            assert not [file for file in files if b"not-for-everybody" in file.read_bytes()]
        finally:
            await cluster.kill([parent])
        assert not psutil.wait_procs([child], timeout=120)[1]

    asyncio.run(use())
