"""Which requests travel together, and what becomes of each of them; the engine is a stand-in."""

from __future__ import annotations

import asyncio

import pytest

from milescli.backends.sglang.client import batching
from milescli.backends.sglang.client.batching import MAX_BATCH, REFILL, RequestBatcher
from milescli.backends.sglang.client.http import ConnectionBroken, EngineDied
from tests.waiting import settled

TIMEOUT_S = 30.0


def body(number: int) -> dict:
    return {"input_ids": [number], "sampling_params": {"seed": number}, "return_logprob": True}


def part(index: int, prompt: list[int], *, done: bool = True) -> dict:
    reason = {"type": "length"} if done else None
    return {"index": index, "said": prompt, "meta_info": {"finish_reason": reason}}


class Engine:
    """Says each prompt back, the last first; `calls` are the bodies it was sent."""

    def __init__(self, breaks: list[Exception] | None = None) -> None:
        self.calls: list[dict] = []
        self.breaks = breaks or []
        self.was_left = False

    async def stream(self, sent: dict, timeout_s: float):
        self.calls.append(sent)
        prompts = sent["input_ids"]
        try:
            for index in reversed(range(len(prompts))):
                yield part(index, prompts[index], done=False)
                await asyncio.sleep(0)
                yield part(index, prompts[index])
                if self.breaks:
                    raise self.breaks.pop(0)
        except (GeneratorExit, asyncio.CancelledError):
            self.was_left = True
            raise


def batcher(*streams) -> RequestBatcher:
    return RequestBatcher({f"engine {place}": stream for place, stream in enumerate(streams)})


def ask_all(count: int, *engines: Engine) -> list[dict]:
    async def main():
        asked = batcher(*(engine.stream for engine in engines))
        try:
            return await asyncio.gather(
                *(asked.ask(body(number), timeout_s=TIMEOUT_S) for number in range(count))
            )
        finally:
            await asked.close()

    return asyncio.run(main())


@pytest.mark.parametrize("count", [1, 7, MAX_BATCH, 2 * MAX_BATCH + 1])
def test_what_is_asked_at_one_moment_travels_together_and_each_gets_its_own_reply(count):
    engine = Engine()
    replies = ask_all(count, engine)
    assert [reply["said"] for reply in replies] == [[number] for number in range(count)]
    assert len(engine.calls) == -(-count // MAX_BATCH)
    sent = [seed["seed"] for call in engine.calls for seed in call["sampling_params"]]
    assert sent == list(range(count))


@pytest.mark.parametrize("count", [2, 16, 2 * MAX_BATCH + 6])
def test_several_engines_get_as_many_each(count):
    engines = [Engine(), Engine()]
    replies = ask_all(count, *engines)
    assert [reply["said"] for reply in replies] == [[number] for number in range(count)]
    shares = [sum(len(call["input_ids"]) for call in engine.calls) for engine in engines]
    assert sum(shares) == count and abs(shares[0] - shares[1]) <= MAX_BATCH // 2


@pytest.mark.parametrize(("num_open", "num_asked"), [(0, 4), (REFILL - 1, 4), (REFILL, 1)])
def test_samples_of_a_prompt_stay_together_where_every_engine_is_busy(num_open, num_asked):
    async def main() -> list[int]:
        asked = list[int]()

        def stream_of(place: int):
            async def stream(sent: dict, timeout_s: float):
                asked.append(place)
                await asyncio.Event().wait()
                yield sent

            return stream

        batches = batcher(*(stream_of(place) for place in range(4)))
        tasks = list[asyncio.Task]()
        for number, count in enumerate((4 * num_open, REFILL)):
            asked.clear()
            tasks += [
                asyncio.create_task(batches.ask(body(number), timeout_s=TIMEOUT_S))
                for _ in range(count)
            ]
            await settled()
        for task in tasks:
            task.cancel()
        await batches.close()
        return asked

    assert len(set(asyncio.run(main()))) == num_asked


def test_the_engine_with_the_fewest_is_asked_next():
    busy, idle = Engine(), Engine()

    async def main():
        never = asyncio.Event()

        async def stuck(sent, timeout_s):
            busy.calls.append(sent)
            await never.wait()
            yield part(0, [0])

        asked = batcher(stuck, idle.stream)
        waits = asyncio.create_task(asked.ask(body(0), timeout_s=TIMEOUT_S))
        await settled()
        replies = [await asked.ask(body(number), timeout_s=TIMEOUT_S) for number in (1, 2)]
        await asked.close()
        await asyncio.gather(waits, return_exceptions=True)
        return replies

    assert [reply["said"] for reply in asyncio.run(main())] == [[1], [2]]
    assert len(busy.calls) == 1 and len(idle.calls) == 2


def test_what_a_broken_connection_left_is_asked_again_and_the_rest_is_not(monkeypatch):
    monkeypatch.setattr(batching, "RETRY_WAITS_S", (0.0, 0.0))
    engine = Engine(breaks=[ConnectionBroken("broke", why="", fix="")])
    replies = ask_all(3, engine)
    assert [reply["said"] for reply in replies] == [[0], [1], [2]]
    assert [call["input_ids"] for call in engine.calls] == [[[0], [1], [2]], [[0], [1]]]


def test_an_error_reaches_everyone_who_still_waits(monkeypatch):
    monkeypatch.setattr(batching, "RETRY_WAITS_S", ())

    async def main():
        asked = batcher(Engine(breaks=[ConnectionBroken("broke", why="", fix="")]).stream)
        return await asyncio.gather(
            *(asked.ask(body(number), timeout_s=TIMEOUT_S) for number in range(3)),
            return_exceptions=True,
        )

    first, second, third = asyncio.run(main())
    assert isinstance(first, ConnectionBroken) and isinstance(second, ConnectionBroken)
    assert third["said"] == [2]


def test_a_stream_that_ends_too_early_is_no_reply(monkeypatch):
    monkeypatch.setattr(batching, "RETRY_WAITS_S", ())

    async def silent(sent, timeout_s):
        yield part(0, [0])

    async def main():
        asked = batcher(silent)
        return await asyncio.gather(
            *(asked.ask(body(number), timeout_s=TIMEOUT_S) for number in range(2)),
            return_exceptions=True,
        )

    first, second = asyncio.run(main())
    assert first["said"] == [0]
    assert isinstance(second, ConnectionBroken)


@pytest.mark.parametrize("num_replies", [0, 1])
def test_a_call_that_nobody_waits_for_any_more_is_given_up(num_replies):
    """Also where some of its requests have their replies."""

    async def main():
        engine, never = Engine(), asyncio.Event()

        async def stuck(sent, timeout_s):
            try:
                for index in range(num_replies):
                    yield part(index, sent["input_ids"][index])
                await never.wait()
            except asyncio.CancelledError:
                engine.was_left = True
                raise

        asked = batcher(stuck)
        tasks = [
            asyncio.create_task(asked.ask(body(n), timeout_s=TIMEOUT_S))
            for n in range(num_replies + 2)
        ]
        await settled()
        tasks[-1].cancel()
        await settled()
        left_early = engine.was_left
        tasks[-2].cancel()
        await settled()
        return left_early, engine.was_left

    assert asyncio.run(main()) == (False, True)


def test_what_a_removed_engine_had_not_replied_to_fails_at_once_and_the_others_go_on():
    async def main():
        other, never = Engine(), asyncio.Event()

        async def stuck(sent, timeout_s):
            yield part(0, sent["input_ids"][0])
            await never.wait()

        asked = batcher(stuck, other.stream)
        tasks = [asyncio.create_task(asked.ask(body(n), timeout_s=TIMEOUT_S)) for n in range(4)]
        await settled()
        asked.remove("engine 0", EngineDied("engine 0 is dead", why="", fix=""))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        again = await asked.ask(body(9), timeout_s=TIMEOUT_S)
        await asked.close()
        return outcomes, again

    (first, second, *rest), again = asyncio.run(main())
    assert first["said"] == [0] and isinstance(second, EngineDied)
    assert [reply["said"] for reply in rest] == [[2], [3]]
    assert again["said"] == [9]


def test_without_any_engine_requests_fail_and_with_a_new_one_they_do_not():
    async def main():
        asked, new = batcher(Engine().stream), Engine()
        asked.remove("engine 0", EngineDied("engine 0 is dead", why="", fix=""))
        outcomes = await asyncio.gather(
            *(asked.ask(body(n), timeout_s=TIMEOUT_S) for n in range(2)), return_exceptions=True
        )
        asked.add("engine 1", new.stream)
        reply = await asked.ask(body(7), timeout_s=TIMEOUT_S)
        await asked.close()
        return outcomes, reply

    outcomes, reply = asyncio.run(main())
    assert [type(outcome) for outcome in outcomes] == [EngineDied, EngineDied]
    assert reply["said"] == [7]


def asked_at(engines: list[Engine], prompt: int) -> list[int]:
    """The engines that were asked this prompt, in their order."""
    return [
        place
        for place, engine in enumerate(engines)
        for call in engine.calls
        if [prompt] in call["input_ids"]
    ]


def test_turns_of_a_conversation_are_asked_of_one_engine():
    async def main():
        engines = [Engine(), Engine()]
        asked = batcher(*(engine.stream for engine in engines))
        for turn in range(3):
            await asyncio.gather(
                *(
                    asked.ask(body(10 * turn + n), timeout_s=TIMEOUT_S, conversation=n + 1)
                    for n in (range(6) if turn % 2 else reversed(range(6)))
                )
            )
        await asked.close()
        return engines

    engines = asyncio.run(main())
    for conversation in range(6):
        assert len({asked_at(engines, 10 * turn + conversation)[0] for turn in range(3)}) == 1
    assert {asked_at(engines, n)[0] for n in range(6)} == {0, 1}


def test_a_conversation_leaves_an_engine_that_is_busier_or_gone():
    async def main():
        never, home, other = asyncio.Event(), Engine(), Engine()

        async def sometimes(sent, timeout_s):
            if len(sent["input_ids"]) > 1:
                home.calls.append(sent)
                await never.wait()
            async for each in home.stream(sent, timeout_s):
                yield each

        asked = batcher(sometimes, other.stream)
        await asked.ask(body(1), timeout_s=TIMEOUT_S, conversation=7)
        crowd = [
            asyncio.create_task(asked.ask(body(100 + n), timeout_s=TIMEOUT_S))
            for n in range(2 * MAX_BATCH)
        ]
        await settled()
        await asked.ask(body(2), timeout_s=TIMEOUT_S, conversation=7)
        asked.remove("engine 1", EngineDied("engine 1 is dead", why="", fix=""))
        third = asyncio.create_task(asked.ask(body(3), timeout_s=TIMEOUT_S, conversation=7))
        await settled()
        places = [asked_at([home, other], number) for number in (1, 2, 3)]
        never.set()
        await asyncio.gather(third, *crowd, return_exceptions=True)
        await asked.close()
        return places

    assert asyncio.run(main()) == [[0], [1], [0]]


def test_ids_travel_each_with_its_own_request_and_an_empty_one_where_there_is_none():
    engine = Engine()

    async def main():
        asked = batcher(engine.stream)
        bodies = [body(0), {**body(1), "rid": "one"}, {**body(2), "rid": "two"}]
        try:
            await asyncio.gather(*(asked.ask(each, timeout_s=TIMEOUT_S) for each in bodies))
            await asked.ask(body(3), timeout_s=TIMEOUT_S)
        finally:
            await asked.close()

    asyncio.run(main())
    assert engine.calls[0]["rid"] == ["", "one", "two"]
    assert "rid" not in engine.calls[1]
