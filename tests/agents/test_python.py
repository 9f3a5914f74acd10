"""Python as a tool: an interpreter of the sandbox, one for each episode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from milescli.agents.python import Python
from milescli.core.errors import MachineError, RecipeError
from milescli.recipe.rewards import CodeSettings
from milescli.recipe.schema import Rollout
from milescli.sandbox.choose import choose


@pytest.fixture(scope="module", autouse=True)
def has_sandbox() -> None:
    """Tried once."""
    try:
        choose()
    except MachineError as error:
        pytest.skip(error.why)


def played(play: Callable[[Python], Awaitable[object]], **settings: object) -> None:
    """One episode."""

    async def run() -> None:
        tool = Python(Rollout(tools=["python"], **settings))  # type: ignore[arg-type]
        try:
            await play(tool)
        finally:
            await tool.close()

    asyncio.run(run())


def test_variables_live_on_and_the_last_value_is_shown() -> None:
    async def play(tool: Python) -> None:
        assert await tool(code="x = 6 * 7\nprint('so')") == "so"
        assert await tool(code="x + 1") == "43"
        assert await tool(code="y = x") == "(it printed nothing)"

    played(play)


def test_an_error_is_told_as_python_tells_it() -> None:
    async def play(tool: Python) -> None:
        assert "ZeroDivisionError: division by zero" in await tool(code="1 / 0")
        assert "SyntaxError" in await tool(code="1 +")
        assert await tool(code="2 + 2") == "4"

    played(play)


def test_what_takes_too_long_is_ended_and_the_model_is_told() -> None:
    async def play(tool: Python) -> None:
        assert "error: wall time" in await tool(code="x = 1\nwhile True: pass")
        # on a busy machine the next one may take too long to start, too, and it is told
        assert (await tool(code="3 * 3")).endswith("9")

    played(play, tool_timeout_s=2.0)


def test_an_interpreter_that_was_ended_begins_anew_and_says_so() -> None:
    async def play(tool: Python) -> None:
        await tool(code="x = 1")
        ended = await tool(code="b = bytearray(10**10)\nc = b'1' * 10**10")
        assert "MemoryError" in ended or "error: " in ended
        await tool(code="import os; os._exit(3)")
        told = await tool(code="2 + 3")
        assert told == "the interpreter was started anew; variables are gone\n5"

    played(play, code=CodeSettings(memory_mib=128))


def test_a_server_elsewhere_is_refused_before_a_run_begins() -> None:
    with pytest.raises(RecipeError, match="must run on this machine"):
        Python.require(Rollout(code=CodeSettings(url="http://sandbox:8080")))


def test_episodes_know_nothing_of_each_other() -> None:
    async def play(tool: Python) -> None:
        other = Python(Rollout(tools=["python"]))
        await tool(code="open('secret', 'w').write('x'); x = 1")
        assert "NameError" in await other(code="x")
        assert "FileNotFoundError" in await other(code="open('secret')")
        await other.close()

    played(play)


def test_more_episodes_than_there_is_room_for_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("milescli.agents.python.MAX_OPEN", 2)
    at_once: list[int] = []

    async def episode(running: set[int], number: int) -> None:
        tool = Python(Rollout(tools=["python"]))
        await tool.open()
        running.add(number)
        at_once.append(len(running))
        assert await tool(code=f"{number} * 2") == str(number * 2)
        running.discard(number)
        await tool.close()

    async def run() -> None:
        running: set[int] = set()
        await asyncio.gather(*(episode(running, number) for number in range(6)))

    asyncio.run(run())
    assert max(at_once) == 2


def test_the_machine_is_out_of_reach() -> None:
    async def play(tool: Python) -> None:
        read = await tool(code="open('/etc/shadow').read()")
        assert "Error" in read
        connect = "import socket; socket.create_connection(('127.0.0.1', 22), 1)"
        assert "Error" in await tool(code=connect)

    played(play)
