"""Requests whose results are asked for later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from milescli.core.errors import MachineError, NotFiniteError
from milescli.runtime.service import futures
from milescli.runtime.service.futures import Futures, JsonResult, Result, TooMany, Unknown
from milescli.runtime.service.wire import ClientError


def _answers(log: list[int]) -> Callable[[], Awaitable[Result]]:
    async def work() -> Result:
        log.append(1)
        return JsonResult({"n": len(log)})

    return work


def test_a_request_that_is_sent_twice_is_done_once() -> None:
    async def main() -> None:
        all_of, log = Futures(print), list[int]()
        for _ in range(3):
            all_of.begin("m:1", "alice", _answers(log))
        results = [await all_of.result("m:1", "alice", within_s=60) for _ in range(2)]
        assert [each and each.to_json() for each in results] == [{"n": 1}] * 2
        with pytest.raises(Unknown):
            all_of.begin("m:1", "bob", _answers(log))
        for number, tenant in (("m:1", "bob"), ("m:2", "alice")):
            with pytest.raises(Unknown):
                await all_of.result(number, tenant, within_s=60)
        await all_of.close()

    asyncio.run(main())


def test_a_result_that_is_not_there_yet_is_none() -> None:
    async def main() -> None:
        all_of, gate = Futures(print), asyncio.Event()

        async def work() -> Result:
            await gate.wait()
            return JsonResult({})

        all_of.begin("m:1", "alice", work)
        assert await all_of.result("m:1", "alice", within_s=0.0) is None
        gate.set()
        assert await all_of.result("m:1", "alice", within_s=60) is not None
        all_of.begin("m:2", "alice", asyncio.Event().wait)  # type: ignore[arg-type]
        await all_of.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "category", "is_told"),
    [
        (ClientError("no such name"), "user", False),
        (ValueError("operands of other shapes"), "server", True),
        (NotFiniteError("nan", why="the loss", fix="lower"), "user", False),
        (MachineError("the disk is full", why="none is free", fix="rm"), "server", True),
        (ZeroDivisionError("x"), "server", True),
    ],
)
def test_a_failure_says_whose_it_is(error: Exception, category: str, is_told: bool) -> None:
    async def main() -> dict[str, Any]:
        all_of = Futures(faults.append)

        async def work() -> Result:
            raise error

        all_of.begin("m:1", "alice", work)
        result = await all_of.result("m:1", "alice", within_s=60)
        assert result is not None
        return result.to_json()

    faults = list[str]()
    told = asyncio.run(main())
    assert told["category"] == category and told["error"] and bool(faults) == is_told


def test_results_are_forgotten_and_open_requests_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        all_of, log = Futures(print), list[int]()
        all_of.begin("m:1", "alice", _answers(log))
        await all_of.result("m:1", "alice", within_s=60)
        monkeypatch.setattr(futures, "KEEP_S", -1.0)
        monkeypatch.setattr(futures, "MAX_OPEN", 1)
        all_of.begin("m:2", "alice", asyncio.Event().wait)  # type: ignore[arg-type]
        with pytest.raises(Unknown):
            await all_of.result("m:1", "alice", within_s=60)
        with pytest.raises(TooMany):
            all_of.begin("m:3", "alice", _answers(log))
        all_of.begin("m:4", "bob", _answers(log))
        await all_of.close()

    asyncio.run(main())
