"""How many requests an engine is sent: no more than it can run and a few that wait, fewer while its
cache is full, and none that is held back is lost. The engine is a stand-in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.backends.sglang.client.admission import MIN_OPEN, REFILL, Admission, Load
from milescli.backends.sglang.client.batching import NotSent, RequestBatcher
from tests.waiting import settled, until_async

TIMEOUT_S = 60.0
_loads = st.builds(
    Load, running=st.integers(0, 500), waiting=st.integers(0, 500), usage=st.floats(0, 1)
)


@given(st.integers(1, 512), st.lists(st.tuples(_loads, st.integers(0, 3))))
def test_the_bound_stays_between_two_and_what_the_engine_can_run(
    slots: int, looks: list[tuple[Load, int]]
) -> None:
    admission = Admission(slots)
    for load, retractions in looks:
        before, admission.num_retractions = admission.limit, retractions
        admission.adapt(load)
        assert MIN_OPEN <= admission.limit <= admission.max_open == slots + admission.queue
        if retractions or load.usage >= 0.95:
            assert admission.limit <= max(before, MIN_OPEN)
        assert admission.num_retractions == 0


def test_an_engine_that_discarded_takes_less_than_it_ran_and_more_when_it_has_room() -> None:
    admission = Admission(256)
    admission.num_retractions = 1
    admission.adapt(Load(running=100, waiting=50, usage=0.5))
    assert admission.limit == 90 and admission.num_spare(80) == 10 and admission.num_spare(120) == 0
    admission.adapt(Load(running=88, waiting=2, usage=0.97))
    assert admission.limit == 88
    admission.adapt(Load(running=40, waiting=40, usage=0.4))
    assert admission.limit == 40 + admission.queue, "its cache holds 40"
    for _ in range(20):
        admission.adapt(Load(running=80, waiting=0, usage=0.4))
    assert admission.limit == admission.max_open


def test_data_parallel_ranks_are_one_engine_and_the_fullest_counts() -> None:
    ranks = [
        {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.2},
        {"num_running_reqs": 4, "num_waiting_reqs": 0, "token_usage": 0.9},
    ]
    assert Load.of(ranks) == Load(running=7, waiting=1, usage=0.9)


class _Engine:
    """Replies to a request when it is let."""

    def __init__(self, retractions: int = 0) -> None:
        self.open: dict[int, asyncio.Event] = {}
        self.seen: list[int] = []
        self.most_open, self.retractions = 0, retractions

    async def stream(self, sent: dict[str, Any], timeout_s: float) -> Any:
        """Say each prompt back when it is let."""
        numbers = [ids[0] for ids in sent["input_ids"]]
        self.seen += numbers
        self.open |= {number: asyncio.Event() for number in numbers}
        self.most_open = max(self.most_open, len(self.open))
        for index, number in enumerate(numbers):
            await self.open[number].wait()
            del self.open[number]
            meta = {"finish_reason": {"type": "stop"}, "num_retractions": self.retractions}
            yield {"index": index, "said": number, "meta_info": meta}

    def let(self, count: int) -> None:
        """Reply to so many, the first of each call first."""
        for number in sorted(self.open)[:count]:
            self.open[number].set()


def _body(number: int) -> dict[str, Any]:
    return {"input_ids": [number], "sampling_params": {"seed": number}}


def _ask(asked: RequestBatcher, count: int) -> list[asyncio.Task[Any]]:
    return [
        asyncio.create_task(asked.ask(_body(number), timeout_s=TIMEOUT_S))
        for number in range(count)
    ]


def test_what_is_held_back_goes_in_order_to_the_engine_that_has_room_first() -> None:
    async def main() -> None:
        quick, slow = _Engine(), _Engine()
        asked = RequestBatcher({"quick": quick.stream, "slow": slow.stream}, max_running=4)
        tasks = _ask(asked, 60)
        await settled()
        most = 4 + REFILL
        assert (len(quick.open), len(slow.open)) == (most, most)

        def is_done() -> bool:
            quick.let(len(quick.open))
            return len(quick.seen) == 60 - most and not quick.open

        await until_async(is_done)
        assert quick.most_open <= most and slow.most_open == most
        held = [number for number in quick.seen if number >= 2 * most]
        assert held == sorted(held), "the first that was asked is the first that is sent"

        def is_over() -> bool:
            slow.let(len(slow.open))
            return all(task.done() for task in tasks)

        await until_async(is_over)
        assert [task.result()["said"] for task in tasks] == list(range(60))
        assert asked.pressure() == (0, 60 - 2 * most) and asked.pressure() == (0, 0)
        await asked.close()

    asyncio.run(main())


def test_held_requests_can_be_given_back_and_cancelled() -> None:
    async def main() -> None:
        engine = _Engine()
        asked = RequestBatcher({"one": engine.stream}, max_running=1)
        tasks = _ask(asked, 14)
        await settled()
        tasks[-1].cancel()
        await settled()
        assert len(engine.open) == 1 + REFILL and asked.return_unsent() == 4
        await settled()
        held = tasks[1 + REFILL : -1]
        assert all(isinstance(task.exception(), NotSent) for task in held)
        assert not tasks[0].done()
        await asked.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("max_running", [None, 100])
def test_an_engine_that_discarded_is_looked_at_once_in_a_while(max_running: int | None) -> None:
    async def main() -> list[str]:
        engine, looks = _Engine(retractions=2), list[str]()

        async def look(url: str) -> Load:
            looks.append(url)
            return Load(running=10, waiting=3, usage=0.8)

        asked = RequestBatcher({"one": engine.stream}, max_running=max_running, read_load=look)
        tasks = _ask(asked, 6)
        await settled()
        engine.let(6)
        await asyncio.gather(*tasks)
        await settled()
        assert asked.pressure() == (12, 0)
        await asked.close()
        return looks

    assert asyncio.run(main()) == ([] if max_running is None else ["one"])


def test_a_closed_engine_is_sent_nothing_and_what_it_would_have_had_goes_elsewhere() -> None:
    async def main() -> None:
        one, other = _Engine(), _Engine()
        asked = RequestBatcher({"one": one.stream, "other": other.stream})
        asked.close_to("one", is_closed=True)
        tasks = _ask(asked, 6)
        await settled()
        assert not one.seen and other.seen == list(range(6))
        asked.close_to("other", is_closed=True)
        held = asyncio.create_task(asked.ask(_body(9), timeout_s=TIMEOUT_S, conversation=1))
        await settled()
        assert 9 not in other.seen, "nobody is open"
        asked.close_to("one", is_closed=False)
        await settled()
        assert one.seen == [9]
        one.let(1)
        other.let(6)
        await asyncio.gather(*tasks, held)
        await asked.close()

    asyncio.run(main())
