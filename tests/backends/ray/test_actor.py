"""What is reported of a process that ran out of memory: it cannot be made to run out on demand, so
that the call's end is Ray's, or torch's, by hand. And bytes go from process to process in parts,
through Ray's object store."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from milescli.backends.ray import actor
from milescli.backends.ray.nodes import ClusterNode
from milescli.core.errors import ExitCode, OutOfMemory, WorkerDied
from milescli.core.units import GIB
from milescli.platform.memory_record import FILE

OF_RAY = (
    "Task was killed due to the node running low on memory.\n"
    "Memory on the node (IP: 127.0.0.1, ID: ab) was 22.81GB used / 23.47GB limit (0.971924), ..."
)


def _ended_by(error: Exception, folder: Path) -> OutOfMemory:
    async def call() -> Any:
        raise error

    async def result() -> None:
        handle = actor.ActorHandle(
            name="trainer rank 0",
            actor=None,
            log_path=folder / "trainer-0.log",
            node=ClusterNode(node_id="ab", address="127.0.0.1", host_name="here", is_driver=True),
            kwargs={},
        )
        await actor._result(handle, call(), "save")

    with pytest.raises(OutOfMemory) as caught:
        asyncio.run(result())
    return caught.value


@pytest.mark.ray
@pytest.mark.usefixtures("session")  # Ray is imported when it has its token
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OF_RAY, "22.81 of the computer's 23.47 GB"),
        ("in other words", "nearly full"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB\nmore"), "Tried 2 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "can't allocate"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_who_ran_out_in_what_and_who_held_how_much_is_told(
    tmp_path: Path, error: Exception | str, said: str
) -> None:
    """`error`: a text is what Ray says where it ended the process."""
    from ray import exceptions

    folder = tmp_path / "mine" / "logs" / "attempt_1"
    folder.mkdir(parents=True)
    look = {
        "time": 1.0,
        "oom_kills": 0,
        "resident_bytes": {"1": 18 * GIB, "2": 3 * GIB},
        "names": {"1": "trainer-0", "2": "engine-0"},
    }
    (folder / FILE).write_text(json.dumps(look) + os.linesep)
    if isinstance(error, str):
        ended = exceptions.OutOfMemoryError(error)
    else:
        ended = exceptions.RayTaskError("run", "traceback", error)
    told = _ended_by(ended, folder)
    assert told.exit_code is ExitCode.DOES_NOT_FIT
    assert told.what == "trainer rank 0 ran out of memory during `save`"
    assert said in told.why
    assert "trainer-0 18.0 GiB, engine-0 3.0 GiB" in told.why
    assert f"{tmp_path}/mine/recipe.yaml --name mine-lora --lora 16" in told.fixes[0]


BYTES = "tests.backends.ray.toys:Bytes"


@pytest.fixture
def pair(session):
    """Run `use(source, sink)` with two processes that hold bytes."""

    def run(use):
        async def main():
            cluster = session[0]
            both = [
                await cluster.spawn(name, BYTES, node=0, kwargs={"seed": seed}, environment={})
                for seed, name in enumerate(("source", "sink"))
            ]
            pids = await actor.start_all(both, timeout_s=60)
            try:
                return await use(*both, pids)
            finally:
                await cluster.kill(both)

        return asyncio.run(main())

    return run


def _move(source, sink):
    return actor.move(
        1_000_001,
        source=source,
        read=("read", "own"),
        sink=sink,
        write=("write", "theirs"),
        timeout_s=120,
    )


def test_bytes_arrive_whole_and_in_their_places(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "CHUNK_BYTES", 300_000)

    async def use(source, sink, _):
        await _move(source, sink)
        sent, got = await source.run("sha256", "own", timeout_s=120), sink.run
        assert await got("sha256", "theirs", timeout_s=120) == sent

    pair(use)


@pytest.mark.parametrize("victim", [0, 1])
def test_whoever_dies_of_the_two_it_is_a_death(pair, victim: int) -> None:
    async def use(source, sink, pids):
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            await _move(source, sink)
        assert ("source sent no bytes", "sink died")[victim] in caught.value.what

    pair(use)
