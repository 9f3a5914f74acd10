"""A process that is stopped while a run starts is ended, and no other. Real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from milescli.core.events import EventBus, WorkerSilent
from milescli.core.run_processes import TOKEN_VARIABLE
from milescli.runtime.supervise import StartWatch

TOKEN = "token-of-test-start-watch"


@pytest.fixture
def processes() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """By title."""
    with ExitStack() as stack:
        started = {}
        for title in ("ray::Host", "sglang::scheduler", "user_worker"):
            process = subprocess.Popen(
                ["bash", "-c", f"exec -a {title} sleep 300"],
                env={**os.environ, TOKEN_VARIABLE: TOKEN},
            )
            stack.callback(process.wait, 30)
            stack.callback(process.kill)
            started[title] = process
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(title.encode()):
                time.sleep(0.01)
        yield started


@pytest.mark.usefixtures("a_second_a_look")
@pytest.mark.parametrize("is_over", [False, True])
def test_what_is_stopped_too_long_is_ended_until_all_has_started(
    processes: dict[str, subprocess.Popen[bytes]], is_over: bool
) -> None:
    for title in ("sglang::scheduler", "user_worker"):
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
    assert processes["ray::Host"].poll() is None and processes["user_worker"].poll() is None
    assert [event.worker for event in told] == ["sglang::scheduler"]
