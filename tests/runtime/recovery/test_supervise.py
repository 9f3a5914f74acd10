"""Supervision: the first cause wins over its symptoms, and signals stop what can be stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from milescli.core.errors import DataError, Interrupted, Terminated, WorkerDied
from milescli.core.events import EventBus, WorkerSilent
from milescli.core.run_processes import TOKEN_VARIABLE
from milescli.runtime.recovery.supervise import StartWatch, StopSignals, run_watched
from tests.waiting import settled, until, until_async


def _run(work, probes=(), on_stop=lambda: False) -> None:
    asyncio.run(
        run_watched(
            work,
            list(probes),
            StopSignals(on_stop=on_stop, resume_command=lambda: "miles resume it"),
        )
    )


async def _dead_engine() -> None:
    raise WorkerDied("engine 0 died", why="SIGKILL", fix="less log")


async def _lost_peer() -> None:
    raise ConnectionResetError("Connection reset by peer")


async def _sleep() -> None:
    await asyncio.sleep(60)


def test_a_dead_process_is_named_rather_than_the_connection_that_it_took_along() -> None:
    with pytest.raises(WorkerDied, match="engine 0 died"):
        _run(_lost_peer(), [_dead_engine])


def test_a_dead_process_ends_work_that_would_wait_for_ever() -> None:
    with pytest.raises(WorkerDied, match="engine 0 died"):
        _run(_sleep(), [_dead_engine])


def test_a_probe_that_waits_holds_up_no_other() -> None:
    looks = []

    async def dies_later() -> None:
        looks.append(1)
        if len(looks) == 2:
            await _dead_engine()

    with pytest.raises(WorkerDied, match="engine 0 died"):
        _run(_sleep(), [_sleep, dies_later])


def test_an_error_of_the_users_making_is_told_at_once() -> None:
    async def bad_row() -> None:
        raise DataError("row 3 is broken", why="no JSON", fix="fix it")

    with pytest.raises(DataError, match="row 3"):
        _run(bad_row())


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Terminated)]
)
def test_a_signal_with_nothing_to_save_ends_at_once(number: int, kind: type[Exception]) -> None:
    async def work() -> None:
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)

    with pytest.raises(kind):
        _run(work())


def test_the_first_signal_asks_and_the_second_ends() -> None:
    asked = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await until_async(lambda: asked)
        assert asked == [True]
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(Interrupted):
        _run(work(), on_stop=lambda: asked.append(True) or True)


def test_work_that_ends_in_order_ends_the_watch() -> None:
    async def work() -> None:
        await settled()

    async def healthy() -> None:
        return None

    _run(work(), [healthy])


TOKEN = "token-of-test-start-watch"


@pytest.fixture
def processes() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """By title."""
    with ExitStack() as stack:
        started = {}
        for title in ("ray::Host", "sglang::scheduler", "workers.child"):
            process = subprocess.Popen(
                ["bash", "-c", f"exec -a {title} sleep 300"],
                env={**os.environ, TOKEN_VARIABLE: TOKEN},
            )
            stack.callback(process.wait, 120)
            stack.callback(process.kill)
            started[title] = process
            line = Path(f"/proc/{process.pid}/cmdline")
            until(lambda line=line, title=title: line.read_bytes().startswith(title.encode()))
        yield started


@pytest.mark.usefixtures("a_second_a_look")
@pytest.mark.parametrize("is_over", [False, True])
def test_what_is_stopped_too_long_is_ended_until_all_has_started(
    processes: dict[str, subprocess.Popen[bytes]], is_over: bool
) -> None:
    for title in ("sglang::scheduler", "workers.child"):
        processes[title].send_signal(signal.SIGSTOP)
        os.waitpid(processes[title].pid, os.WUNTRACED)
    told = list[WorkerSilent]()
    watch = StartWatch(TOKEN, silence_s=3.0, bus=EventBus([told.append]), is_over=lambda: is_over)
    for _ in range(9):
        asyncio.run(watch.probe())
    if is_over:
        assert not told and all(process.poll() is None for process in processes.values())
        return
    assert processes["sglang::scheduler"].wait(120) == -signal.SIGKILL
    assert processes["ray::Host"].poll() is None and processes["workers.child"].poll() is None
    assert [event.worker for event in told] == ["sglang::scheduler"]
