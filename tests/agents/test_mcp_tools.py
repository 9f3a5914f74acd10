"""Tools of MCP servers, by real servers: what the model is told of them, who starts and ends them,
and what a server that fails costs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from milescli.agents import mcp_server, mcp_tools
from milescli.agents.mcp_tools import close_servers
from milescli.agents.tool_kit import ToolKit, offered_tools
from milescli.agents.tools import ToolBox
from milescli.core.errors import AgentError, MachineError, RecipeError
from milescli.platform.ports import free_ports
from milescli.recipe.schema import Recipe, Rollout
from milescli.rollout.base import ToolCall
from milescli.rollout.episode.episode import load_agent
from milescli.runtime.inputs.plugins import check_plugins_quickly
from milescli.workers import guard
from tests.agents.test_tools import PROMPT, Session, call
from tests.waiting import assert_gone, runs, until

pytest.importorskip("mcp", reason="the package mcp is not installed: pip install 'mcp>=2'")
PROGRAM = str(Path(__file__).with_name("mcp_program.py"))
COMMAND = [sys.executable, PROGRAM]
TOOLS = ["add", "pid", "begin", "variable", "picture", "sleep", "die"]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No test leaves a server behind."""
    yield
    close_servers()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a server that is there already."""
    port = free_ports(1)[0]
    with subprocess.Popen([*COMMAND, str(port)]) as process:
        url = f"http://127.0.0.1:{port}/mcp"
        until(lambda: _answers(url))
        yield url
        process.kill()


def _answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=60)
    except httpx.TransportError:
        return False
    return True


def rollout_of(server: dict[str, Any], *, tools: Sequence[str] = (), **settings: Any) -> Rollout:
    """With one server."""
    told = {"agent": "tools", "tools": list(tools), "mcp": {"calc": server}, **settings}
    return Rollout.model_validate(told)


def told(rollout: Rollout, *calls: ToolCall) -> tuple[list[Any], ToolBox]:
    """What the model is told of calls, in one episode."""

    async def play() -> tuple[list[Any], ToolBox]:
        kit = ToolKit(rollout)
        await kit.complete()
        box = ToolBox(kit)
        try:
            return [await box.call(one) for one in calls], box
        finally:
            await box.close()

    return asyncio.run(play())


@pytest.mark.parametrize("way", ["stdio", "http"])
def test_tools_of_a_server_are_called_as_any_other(
    way: str, request: pytest.FixtureRequest
) -> None:
    at = {"command": COMMAND}
    server = at if way == "stdio" else {"url": request.getfixturevalue("address")}
    rollout = rollout_of({**server, "tools": ["add", "picture"]}, tools=["calculator"])
    known = {schema["function"]["name"]: schema["function"] for schema in offered_tools(rollout)}
    assert list(known) == ["calculator", "add", "picture"]
    assert known["add"]["description"] == "Add two numbers."
    assert known["add"]["parameters"]["properties"]["a"]["type"] == "integer"
    calls = [call("add", a=2, b=3), call("picture"), call("calculator", expression="6*7")]
    texts, box = told(rollout, *calls)
    (five, (cat, image), product) = texts
    assert (five, product) == ("5", "42") and box.num_errors == 0
    assert cat == {"type": "text", "text": "a cat"}
    assert image["image_url"]["url"].startswith("data:image/png;base64,")


def test_what_the_server_refuses_is_told_to_the_model_and_counted() -> None:
    mistakes = [call("add", b=3), call("add", a="x"), call("sub"), call("add", a=1)]
    (lacking, wrong, unknown, right), box = told(rollout_of({"command": COMMAND}), *mistakes)
    assert lacking.startswith("error: ") and "required" in lacking
    assert wrong.startswith("error: ") and "integer" in wrong
    assert unknown.startswith("error: there is no tool sub; the tools are add, pid")
    assert right == "2" and box.num_errors == 3


def test_episodes_share_one_server_which_ends_with_the_run() -> None:
    rollout = rollout_of({"command": COMMAND})
    offered_tools(rollout)
    pids = {told(rollout, call("pid"))[0][0] for _ in range(2)}
    begun = told(rollout, call("begin"))[0]
    assert len(pids) == 1
    close_servers()
    assert_gone(int(pids.pop()), int(begun[0]))


def test_a_server_ends_where_the_run_is_killed() -> None:
    script = """
import asyncio, sys
from tests.agents.test_mcp_tools import call, rollout_of, told, COMMAND
print(*told(rollout_of({"command": COMMAND}), call("pid"), call("begin"))[0], flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2 and all(map(runs, pids))
        os.kill(driver.pid, signal.SIGKILL)
    assert_gone(*pids)


def test_a_server_that_dies_is_begun_anew_and_the_call_is_an_error() -> None:
    calls = [call("pid"), call("die"), call("pid")]
    (first, died, second), box = told(rollout_of({"command": COMMAND}), *calls)
    assert died.startswith("error: the server of die was lost") and first != second
    assert box.num_errors == 1


def test_a_server_that_dies_again_and_again_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_server, "MAX_LOST", 2)
    with pytest.raises(AgentError, match="`calc` was lost 2 times in a row"):
        told(rollout_of({"command": COMMAND}), call("die"), call("die"))


def test_a_server_at_an_address_that_goes_away_is_an_error_and_comes_back() -> None:
    port = free_ports(1)[0]
    serve = [*COMMAND, str(port)]
    keeper = f"import subprocess\nwhile True: subprocess.run({serve!r})"
    command = guard.guarded([sys.executable, "-c", keeper])
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            rollout = rollout_of({"url": f"http://127.0.0.1:{port}/mcp"})
            first = _once_there(rollout)
            (died,), _ = told(rollout, call("die"))
            assert died.startswith("error: the server of die was lost")
            assert _once_there(rollout) != first
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _once_there(rollout: Rollout) -> str:
    """Its pid, when it is reached."""

    def reached() -> str | None:
        with contextlib.suppress(AgentError, MachineError):
            text = told(rollout, call("pid"))[0][0]
            return None if text.startswith("error") else text
        return None

    return until(reached)


def test_a_slow_call_is_given_up_and_the_server_goes_on() -> None:
    rollout = rollout_of({"command": COMMAND}, tool_timeout_s=10.0)
    (before, slow, after), _ = told(rollout, call("pid"), call("sleep", seconds=60.0), call("pid"))
    assert slow == "error: sleep did not end within 10 s" and before == after


def test_variables_are_passed_on_by_name_and_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OF_THE_SERVER", "a-secret-value")
    monkeypatch.setenv("OF_OTHERS", "a-secret-value-too")
    rollout = rollout_of({"command": COMMAND, "env": ["OF_THE_SERVER"]})
    calls = [call("variable", key=name) for name in ("OF_THE_SERVER", "OF_OTHERS", "HOME")]
    (own, other, home), _ = told(rollout, *calls)
    assert (own, other, home) == ("<OF_THE_SERVER>", "nothing", os.environ["HOME"])
    assert PROGRAM in _words_of_servers() and "a-secret-value" not in _words_of_servers()


def _words_of_servers() -> list[str]:
    """The command lines of those that this process has started."""
    commands = [child.cmdline() for child in psutil.Process().children()]
    return [word for words in commands if guard.__file__ in words for word in words]


def refused(server: dict[str, Any], kind: type[Exception] = MachineError) -> Any:
    """The refusal of a recipe with it, before anything is played."""
    with pytest.raises(kind) as caught:
        offered_tools(rollout_of(server, tools=["calculator"]))
    return caught.value


def test_a_variable_that_is_not_there_is_refused_by_name() -> None:
    error = refused({"command": COMMAND, "env": ["NOT_THERE"]})
    assert "needs the environment variable NOT_THERE" in error.what
    assert error.fixes == ["export NOT_THERE=..."]


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ({"command": ["no-such-program"]}, "no-such-program: No such file"),
        ({"command": [sys.executable, "-c", "exit('no licence')"]}, "no licence"),
        ({"command": [sys.executable, "-c", "print('hi')"]}, "onnection closed"),
        ({"url": "http://127.0.0.1:9/mcp"}, "onnect"),
    ],
    ids=["not there", "refuses", "speaks otherwise", "nobody listens"],
)
def test_a_server_that_does_not_start_is_refused(server: dict[str, Any], why: str) -> None:
    error = refused(server)
    assert error.what == "the MCP server `calc` cannot be used" and why in error.why
    assert " ".join(server.get("command", ["curl -i"])) in error.fixes[0]


def test_a_server_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_server, "START_TIMEOUT_S", 0.5)
    error = refused({"command": [sys.executable, "-c", "import time; time.sleep(60)"]})
    assert "did not answer within 0.5 s" in error.why
    assert not _words_of_servers()


def test_a_tool_that_the_server_lacks_is_refused() -> None:
    error = refused({"command": COMMAND, "tools": ["subtract"]}, RecipeError)
    assert "no tool `subtract`" in error.what and error.why == f"it has {', '.join(TOOLS)}"


def test_two_tools_of_one_name_are_refused() -> None:
    rollout = rollout_of({"command": COMMAND})
    twice = rollout.model_copy(update={"mcp": {**rollout.mcp, "more": rollout.mcp["calc"]}})
    with pytest.raises(RecipeError, match="two tools have the name `add`"):
        offered_tools(twice)


def test_without_the_package_the_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "find_spec", lambda name: None)
    error = refused({"command": COMMAND}, RecipeError)
    assert error.fixes == ["pip install 'miles-cli[agents]'"]


def test_a_dry_run_starts_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"open({str(tmp_path / 'begun')!r}, 'w')"]
    check_plugins_quickly(Recipe(rollout=rollout_of({"command": command}, tools=["calculator"])))
    assert not [*tmp_path.iterdir()]


def test_an_agent_in_a_process_of_its_own_has_servers_of_its_own() -> None:
    tool = "tests.agents.user_tools:where"
    rollout = rollout_of({"command": COMMAND, "tools": ["pid", "add"]}, tools=[tool])
    assert len(offered_tools(rollout)) == 3
    assert not _words_of_servers()
    session = Session([call("where"), call("pid"), call("add", a=1), "done"])

    async def episode() -> int:
        agent = load_agent(rollout)
        try:
            assert (await agent(PROMPT, session)).text == "done"  # type: ignore[arg-type]
            where, pid, added = session.results
            parents = [parent.pid for parent in psutil.Process(int(pid)).parents()]
            assert int(where) in parents and added == "2"
            return int(pid)
        finally:
            agent.close()  # type: ignore[attr-defined]

    assert_gone(asyncio.run(episode()))
