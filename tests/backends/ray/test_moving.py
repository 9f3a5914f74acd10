"""Bytes go from process to process in parts, through Ray's object store."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from milescli.backends.ray import moving
from milescli.backends.ray.group import start_all
from milescli.core.errors import WorkerDied

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
            pids = await start_all(both, timeout_s=60)
            try:
                return await use(*both, pids)
            finally:
                await cluster.kill(both)

        return asyncio.run(main())

    return run


def _move(source, sink):
    return moving.move(
        1_000_001,
        source=source,
        read=("read", "own"),
        sink=sink,
        write=("write", "theirs"),
        timeout_s=120,
    )


def test_bytes_arrive_whole_and_in_their_places(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "CHUNK_BYTES", 300_000)

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
        assert ("source gave no bytes", "sink died")[victim] in caught.value.what

    pair(use)
