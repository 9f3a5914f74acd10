"""Tests of interpreters whose variables live: what a cell gives, what ends a session and what does
not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from milescli.core.errors import AgentError
from milescli.sandbox.base import Limits, RunResult, Session
from milescli.sandbox.local import LocalSandbox
from milescli.sandbox.processes import descendants_of

LIMITS = Limits(wall_s=60.0, cpu_s=60.0)


def _with(
    sandbox: LocalSandbox, work: Callable[[Session], Awaitable[None]], limits: Limits = LIMITS
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), await sandbox.open(limits=limits) as session:
            await work(session)

    asyncio.run(main())


async def _all(session: Session, *cells: str) -> list[RunResult]:
    return [await session.execute(cell) for cell in cells]


def test_variables_live_and_the_last_expression_is_shown(sandbox: LocalSandbox) -> None:
    async def work(session: Session) -> None:
        ran = await _all(session, "x = 20", "def f(n):\n    return n + x", "f(22)", "None", "_")
        assert [one.stdout for one in ran] == ["", "", "42\n", "", "42\n"]
        assert all(one.exit_code == 0 and one.ended == "exited" for one in ran)

    _with(sandbox, work)


def test_output_belongs_to_the_cell_that_printed_it(sandbox: LocalSandbox) -> None:
    async def work(session: Session) -> None:
        ran = await _all(
            session,
            "print('a', end='')",
            "import sys; sys.stderr.write('b'); 1",
            "import os; os.system('echo c')",
        )
        assert [(one.stdout, one.stderr) for one in ran] == [
            ("a", ""),
            ("1\n", "b"),
            ("c\n0\n", ""),
        ]

    _with(sandbox, work)


def test_an_error_shows_its_own_lines_and_the_session_goes_on(sandbox: LocalSandbox) -> None:
    async def work(session: Session) -> None:
        first, second, third = await _all(session, "x = 1\ny = x / 0", "if", "x")
        assert (
            first.exit_code == 1 and "y = x / 0" in first.stderr and "ZeroDivision" in first.stderr
        )
        assert first.stderr.count("File ") == 1
        assert "SyntaxError" in second.stderr and third.stdout == "1\n"

    _with(sandbox, work)


def test_a_deep_traceback_is_short(sandbox: LocalSandbox) -> None:
    async def work(session: Session) -> None:
        (ran,) = await _all(session, "def f(n):\n    return f(n + 1)\nf(0)")
        assert "RecursionError" in ran.stderr and len(ran.stderr.splitlines()) < 40

    _with(sandbox, work)


@pytest.mark.parametrize(
    "cell", ["raise SystemExit", "exit = 1", "input()", "x = bytearray(9 << 30)"]
)
def test_what_a_cell_does_to_itself_leaves_the_session(sandbox: LocalSandbox, cell: str) -> None:
    async def work(session: Session) -> None:
        ran = await _all(session, "x = 7", cell, "x")
        assert ran[-1].stdout == "7\n" and session.is_open

    _with(sandbox, work)


def test_a_cell_that_takes_too_long_is_interrupted(sandbox: LocalSandbox) -> None:
    async def work(session: Session) -> None:
        await session.execute("x = 7")
        late = await session.execute("while True: pass", wall_s=0.3)
        assert late.ended == "timeout" and late.exit_code is None and session.is_open
        assert (await session.execute("x")).stdout == "7\n"

    _with(sandbox, work)


@pytest.mark.parametrize(
    ("cell", "ended"),
    [
        ("sum(iter(int, 1))", "timeout"),
        (
            "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass",
            "timeout",
        ),
        ("while True: print('x' * 1000)", "output"),
        ("import os; os.kill(os.getpid(), 9)", "killed"),
        ("import os; os._exit(4)", "exited"),
    ],
    ids=["in C", "no alarm", "output", "signal", "exit"],
)
def test_what_python_does_not_hear_of_ends_the_session(
    sandbox: LocalSandbox, cell: str, ended: str
) -> None:
    async def work(session: Session) -> None:
        ran = await session.execute(cell, wall_s=0.5 if ended == "timeout" else 10.0)
        assert ran.ended == ended and not session.is_open
        with pytest.raises(AgentError, match="is closed"):
            await session.execute("1")

    _with(sandbox, work)


def test_a_session_ends_at_its_own_limits(sandbox: LocalSandbox) -> None:
    async def work(session: Session) -> None:
        ran = await session.execute("import time; time.sleep(30)", wall_s=30.0)
        assert ran.ended == "timeout" and not session.is_open

    _with(sandbox, work, Limits(wall_s=1.0))


def test_what_runs_between_cells_is_bounded_too(sandbox: LocalSandbox) -> None:
    code = "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()"

    async def work(session: Session) -> None:
        await session.execute(code)
        while session.is_open:  # bounded by the test
            with contextlib.suppress(AgentError):
                await session.execute("1")

    _with(sandbox, work, Limits(wall_s=60.0, cpu_s=1.0))


def test_sessions_are_apart_and_leave_nothing(sandbox: LocalSandbox) -> None:
    async def main() -> None:
        sessions = [await sandbox.open(limits=LIMITS) for _ in range(4)]
        for number, session in enumerate(sessions):
            await session.execute(f"x = {number}; open('f', 'w').write('{number}')")
        told = [(await session.execute("x, open('f').read()")).stdout for session in sessions]
        assert told == [f"({number}, '{number}')\n" for number in range(4)]
        for session in sessions:
            await session.close()
            await session.close()

    asyncio.run(main())
    assert sandbox.pid is not None and descendants_of(sandbox.pid) == []


def test_a_large_cell_arrives(sandbox: LocalSandbox) -> None:
    async def work(session: Session) -> None:
        ran = await session.execute(f"text = '{'x' * 3_000_000}'\nlen(text)")
        assert ran.stdout == "3000000\n"

    _with(sandbox, work)
