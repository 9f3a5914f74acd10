"""Tests of a sandbox behind HTTP: what is sent, what its replies mean, and what is no reply. The
server is real, and stands for one of sandbox-fusion."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from milescli.core.errors import MachineError, SandboxError
from milescli.rollout import endpoint
from milescli.rollout.rewards.code.remote_sandbox import RemoteSandbox
from milescli.sandbox.base import Limits, RunResult
from tests.endpoint_server import Asked, Reply, serving


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.01)


def _run(url: str, **options: Any) -> RunResult:
    return asyncio.run(RemoteSandbox(url).run("print(1)", **options))


def _result(status: str = "Finished", **fields: Any) -> Reply:
    result = {"status": status, "stdout": "1\n", "stderr": "", "return_code": 0, **fields}
    return Reply({"status": "Success", "run_result": {"execution_time": 0.5, **result}})


def test_a_program_is_sent_with_its_files_and_bounds() -> None:
    with serving(lambda asked, number: _result()) as server:
        ran = _run(server.url, stdin="2", files={"a": "x"}, limits=Limits(wall_s=3.0))
    assert (ran.stdout, ran.exit_code, ran.ended, ran.seconds) == ("1\n", 0, "exited", 0.5)
    (asked,) = server.asked
    assert asked.path.endswith("/run_code")
    body = asked.body
    assert (body["code"], body["language"], body["stdin"]) == ("print(1)", "python", "2")
    assert body["run_timeout"] == 3.0 and base64.b64decode(body["files"]["a"]) == b"x"


@pytest.mark.parametrize(
    ("reply", "ended", "exit_code"),
    [
        (_result(return_code=1), "exited", 1),
        (_result("TimeLimitExceeded", return_code=None), "timeout", None),
        (_result("Error", return_code=None), "killed", None),
        (_result(return_code=-9), "killed", None),
    ],
)
def test_how_it_ended_is_told(reply: Reply, ended: str, exit_code: int | None) -> None:
    with serving(lambda asked, number: reply) as server:
        ran = _run(server.url)
    assert (ran.ended, ran.exit_code) == (ended, exit_code)


def test_output_is_cut_here_too() -> None:
    with serving(lambda asked, number: _result(stdout="x" * 1000)) as server:
        ran = _run(server.url, limits=Limits(output_bytes=10))
    assert ran.stdout == "x" * 10 and ran.is_truncated


def test_a_server_that_is_busy_is_asked_again() -> None:
    def replies(asked: Asked, number: int) -> Reply:
        return Reply({}, status=503) if number < 2 else _result()

    with serving(replies) as server:
        assert _run(server.url).stdout == "1\n"
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply({"x": 1}, status=400), "HTTP 400"),
        (Reply({}, status=500), "attempt 4 of 4"),
        (Reply([]), "it replied"),
        (Reply({"status": "SandboxError", "message": "full"}), "full"),
        (Reply({"status": "Success"}), "without a run_result"),
    ],
)
def test_what_is_no_reply_is_named(reply: Reply, why: str) -> None:
    with serving(lambda asked, number: reply) as server, pytest.raises(SandboxError) as error:
        _run(server.url)
    assert why in error.value.why and server.url in error.value.what


def test_nobody_there_is_named() -> None:
    with pytest.raises(SandboxError, match="no connection"):
        _run("http://127.0.0.1:1")


def test_it_has_no_sessions() -> None:
    with pytest.raises(MachineError, match="not support sessions"):
        asyncio.run(RemoteSandbox("http://127.0.0.1:1").open())
