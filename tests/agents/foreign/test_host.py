"""The process of a package: asked much at once, bounded, begun anew where it ends, and ended with
all that it began. What runs in it here needs no package, and no virtual environment."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milescli.agents.foreign import host as hosts
from milescli.agents.foreign.host import ForeignHost, ForeignWorker, ProcessLost, close_hosts
from milescli.agents.foreign.packages import PROGRAMS, Package
from milescli.core.errors import AgentError
from milescli.workers.worker import CallFailed
from tests.waiting import assert_gone, runs

PROGRAM = Path(__file__).with_name("echoing.py")


class Echoing(Package):
    """Runs the program of these tests by the Python of these tests."""

    @property
    def interpreter(self) -> Path:
        """See Package."""
        return Path(sys.executable)

    @property
    def program(self) -> Path:
        """See Package."""
        return PROGRAM

    def require(self, *, needed_by: str) -> None:
        """It is there."""


PACKAGE = Echoing(name="echo", about="", use="tests", python=(3, 11), python_below=(4, 0))


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the program finds `miles_serving`; and no test leaves a process behind."""
    monkeypatch.chdir(PROGRAMS)
    yield
    close_hosts()


def host_of(**start: Any) -> ForeignHost:
    """One that is not begun yet."""
    return ForeignHost(PACKAGE, start)


def ask(host: ForeignHost, method: str, *, timeout_s: float = 60.0, **params: Any) -> Any:
    """From a thread."""
    return host.call_now(method, params, timeout_s=timeout_s)


def test_much_is_asked_at_once_and_what_is_printed_is_no_reply() -> None:
    host = host_of()

    async def play() -> list[Any]:
        asked = [host.call("late", {"value": 0, "seconds": 0.5}, timeout_s=60)]
        asked += [host.call("echo", {"value": number}, timeout_s=60) for number in range(1, 200)]
        return await asyncio.gather(*asked)

    assert asyncio.run(play()) == list(range(200))
    assert asyncio.run(play()) == list(range(200))  # from another loop
    assert ask(host, "echo", value={"a": ["ü\n", None, 1.5]}) == {"a": ["ü\n", None, 1.5]}


def test_what_the_program_raises_is_told_with_its_lines() -> None:
    host = host_of()
    with pytest.raises(CallFailed, match="ZeroDivisionError: of the program") as caught:
        ask(host, "fail")
    assert "echoing.py" in str(caught.value)
    with pytest.raises(CallFailed, match="not JSON serializable"):
        ask(host, "object")
    with pytest.raises(CallFailed, match="there is no request __init__"):
        ask(host, "__init__")
    with pytest.raises(CallFailed, match="it was told to"):
        ask(host_of(fails=True), "echo", value=1)


def test_a_request_that_takes_too_long_is_given_up_and_the_others_go_on() -> None:
    host = host_of()
    with pytest.raises(CallFailed, match=r"`late` did not end within 0\.2 s"):
        ask(host, "late", value=1, seconds=600, timeout_s=0.2)

    async def play() -> None:
        await host.call("late", {"value": 1, "seconds": 600}, timeout_s=0.2)

    with pytest.raises(CallFailed, match=r"`late` did not end within 0\.2 s"):
        asyncio.run(play())
    first = host.pid
    assert ask(host, "echo", value=2) == 2 and host.pid == first


def test_one_that_answers_nobody_is_ended_and_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_PING_TIMEOUT_S", 0.5)
    host = host_of()
    ask(host, "echo", value=1)
    with pytest.raises(CallFailed, match="`hold` did not end"):
        ask(host, "hold", timeout_s=0.2)
    assert ask(host, "echo", value=2) == 2


def test_one_that_dies_is_begun_anew_and_says_its_last_words() -> None:
    host = host_of()
    with pytest.raises(ProcessLost, match="last words"):
        ask(host, "die")
    assert ask(host, "echo", value=1) == 1


def test_one_that_dies_again_and_again_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "MAX_LOST", 2)
    host = host_of()
    with pytest.raises(ProcessLost):
        ask(host, "die")
    with pytest.raises(AgentError, match="ended 2 times in a row") as caught:
        ask(host, "die")
    assert "last words" in caught.value.why


def test_it_cleans_up_and_ends_with_all_that_it_began() -> None:
    process = ForeignWorker(PACKAGE, start={}, folders=[str(PROGRAMS)])
    assert process.started.result(60)
    child = process.call("child", {})[1].result(60)
    guard = process.pid
    process.close(60, cause="it was closed")
    assert not process.lives
    assert_gone(guard, child)
    with pytest.raises(ProcessLost, match="it cleaned up"):
        process.call("echo", {"value": 1})[1].result(60)


def test_it_ends_where_the_run_is_killed() -> None:
    script = """
import sys
from tests.agents.foreign.test_host import ask, host_of
host = host_of()
print(ask(host, "child"), host.pid, flush=True)
sys.stdin.read()
"""
    root = str(Path(__file__).parents[3])
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True, env=environment
    ) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2 and all(map(runs, pids))
        os.kill(driver.pid, signal.SIGKILL)
    assert_gone(*pids)
