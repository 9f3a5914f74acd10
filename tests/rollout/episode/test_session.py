"""Sessions: what the engine was given and gave is what is trained on, token by token, however an
agent goes about it."""

from __future__ import annotations

import asyncio
import tracemalloc
from array import array
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import AgentError
from milescli.core.types import (
    Image,
    ImageSpan,
    Prompt,
    RoutedExperts,
    StopReason,
    Trajectory,
    VersionSpan,
    WeightVersion,
)
from milescli.rollout.base import Completion, GenerateRequest
from milescli.rollout.episode.session import RecordingSession, turn_seed
from tests.waiting import settled

MAX_TOKENS = 40


class Engine:
    """Samples tokens 1000, 1001, ... and remembers each request; version: its number."""

    def __init__(self, *, length: int = 2, routed: bool = False) -> None:
        self.length, self.routed = length, routed
        self.requests: list[GenerateRequest] = []
        self.sampled: list[list[int]] = []
        self._next = 1000

    async def generate(self, request: GenerateRequest) -> Completion:
        number, count = len(self.requests), min(self.length, request.max_new_tokens)
        self.requests.append(request)
        tokens = list(range(self._next, self._next + count))
        self._next += count
        self.sampled.append(tokens)
        rows = len(request.prompt_ids) + count - 1 - request.num_known_routes
        record = bytes([number]) * rows
        return Completion(
            response_ids=tokens,
            logprobs=array("f", [-0.5 * (number + 1)] * count),
            stop_reason=StopReason.STOP,
            version_spans=[VersionSpan(start=0, end=count, version=WeightVersion(number))],
            routed_experts=RoutedExperts(indices=record, num_tokens=rows, num_layers=1, topk=1)
            if self.routed
            else None,
        )


def _record(
    engine: Engine,
    play: Callable[[RecordingSession], Awaitable[object]],
    prompt: Prompt = Prompt(index=7, token_ids=[], text=""),
) -> list[Trajectory]:
    session = RecordingSession(
        engine,  # type: ignore[arg-type]
        prompt=prompt,
        seed=11,
        settings=GenerateRequest(prompt_ids=(), max_new_tokens=8),
        max_tokens=MAX_TOKENS,
        vocab_size=5000,
        decode=lambda ids: " ".join(map(str, ids)),
    )
    asyncio.run(_play(session, play))
    return session.trajectories()


async def _play(
    session: RecordingSession, play: Callable[[RecordingSession], Awaitable[object]]
) -> None:
    await play(session)


def test_one_turn_is_one_trajectory() -> None:
    (made,) = _record(Engine(), lambda session: session.generate([5, 6]))
    assert made.token_ids.tolist() == [5, 6, 1000, 1001]
    assert list(made.loss_mask) == [0, 0, 1, 1]
    assert made.logprobs.tolist() == [0.0, 0.0, -0.5, -0.5]
    assert made.version_spans == [VersionSpan(start=2, end=4, version=WeightVersion(0))]


SPAN = ImageSpan(start=1, num_tokens=4, grid=(1, 4, 4), sha256="ab")
SHOWN = Prompt(
    index=7,
    token_ids=[3, 9, 9, 9, 9, 4, 8],
    text="",
    images=[Image(sha256="ab", png=b"P", width=56, height=56, grid=(1, 4, 4), num_tokens=4)],
    image_spans=[SPAN],
)


def test_every_turn_shows_the_images_of_the_prompt() -> None:
    async def play(session: RecordingSession) -> None:
        turn = await session.generate(SHOWN.token_ids)
        await session.generate([*turn.prompt_ids, *turn.response_ids, 70])
        await session.generate([5])

    engine = Engine()
    line, blind = _record(engine, play, prompt=SHOWN)
    assert [request.images for request in engine.requests] == [[(SPAN, b"P")], [(SPAN, b"P")], []]
    assert line.image_spans == (SPAN,) and blind.image_spans == ()


@pytest.mark.parametrize("ids", [[9, 5], [*SHOWN.token_ids, 9], SHOWN.token_ids[1:]])
def test_tokens_of_images_elsewhere_are_refused(ids: list[int]) -> None:
    engine = Engine()
    with pytest.raises(AgentError, match="image tokens"):
        _record(engine, lambda session: session.generate(ids), prompt=SHOWN)
    assert not engine.requests


async def _dialogue(session: RecordingSession) -> None:
    turn = await session.generate([5])
    turn = await session.generate([*turn.prompt_ids, *turn.response_ids, 70, 71])
    await session.generate([*turn.prompt_ids, *turn.response_ids, 80])


def test_a_dialogue_is_one_trajectory_whose_mask_covers_what_the_policy_said() -> None:
    engine = Engine(routed=True)
    (made,) = _record(engine, _dialogue)
    assert made.token_ids.tolist() == [5, 1000, 1001, 70, 71, 1002, 1003, 80, 1004, 1005]
    assert list(made.loss_mask) == [0, 1, 1, 0, 0, 1, 1, 0, 1, 1]
    assert [span.version for span in made.version_spans] == [0, 1, 2]
    assert all(
        made.loss_mask[t] for span in made.version_spans for t in range(span.start, span.end)
    )
    assert made.routed_experts is not None
    rows = list(made.routed_experts.indices)
    assert rows == [0, 0, 1, 1, 1, 1, 2, 2, 2], "rows of the weights that sampled stay"
    known = [request.num_known_routes for request in engine.requests]
    assert known == [0, 2, 6], "what is known is not asked for again"


def test_a_branch_has_the_routes_of_what_it_goes_on_from() -> None:
    async def play(session: RecordingSession) -> None:
        first = await session.generate([5, 6])
        start = [*first.prompt_ids, *first.response_ids]
        await session.generate([*start, 70])
        await session.generate([*start, 80])
        await session.generate([5, 6, 90])

    engine = Engine(routed=True)
    lines = _record(engine, play)
    rows = [list(line.routed_experts.indices) for line in lines if line.routed_experts]
    assert rows == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 2, 2, 2], [3, 3, 3, 3]]
    assert [request.num_known_routes for request in engine.requests] == [0, 3, 3, 0]


@pytest.mark.parametrize("routed", [False, True])
def test_memory_grows_with_the_length_of_a_dialogue_and_not_with_its_turns(
    routed: bool,
) -> None:
    engine = Engine(length=100, routed=routed)
    session = RecordingSession(
        engine,  # type: ignore[arg-type]
        prompt=Prompt(index=7, token_ids=[], text=""),
        seed=11,
        settings=GenerateRequest(prompt_ids=(), max_new_tokens=100),
        max_tokens=100_000,
        decode=lambda ids: "",
    )

    async def play() -> None:
        line = list(range(1000, 1300))
        for _ in range(60):
            turn = await session.generate(line)
            line = [*turn.prompt_ids, *turn.response_ids, *range(1000, 1200)]

    tracemalloc.start()
    asyncio.run(play())
    engine.requests.clear()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (whole,) = session.trajectories()
    assert size < 40 * whole.num_tokens, "the prompts of all turns have 30 times as many tokens"


def test_a_turn_that_rewrites_history_begins_a_line_of_its_own() -> None:
    async def play(session: RecordingSession) -> None:
        turn = await session.generate([5, 6])
        await session.generate([5, 6, turn.response_ids[0], 99])

    first, second = _record(Engine(), play)
    assert first.token_ids.tolist() == [5, 6, 1000, 1001]
    assert second.token_ids.tolist() == [5, 6, 1000, 99, 1002, 1003]
    assert list(second.loss_mask) == [0, 0, 0, 0, 1, 1], "a sampled token counts once"


def test_each_turn_has_a_seed_of_its_own_and_the_first_that_of_the_sample() -> None:
    engine = Engine()
    _record(engine, _dialogue)
    seeds = [request.seed for request in engine.requests]
    assert seeds[0] == 11 and seeds == [turn_seed(11, turn) for turn in range(3)]
    assert len(set(seeds)) == 3


def test_a_trajectory_stays_within_what_the_run_was_planned_for() -> None:
    engine = Engine(length=100)
    (made,) = _record(engine, lambda session: session.generate([1] * (MAX_TOKENS - 3)))
    assert made.num_tokens == MAX_TOKENS
    with pytest.raises(AgentError, match="prompt 7 asked for a response to 40 tokens"):
        _record(Engine(), lambda session: session.generate([1] * MAX_TOKENS))
    with pytest.raises(AgentError, match="0 tokens"):
        _record(Engine(), lambda session: session.generate([]))


class Reversed(Engine):
    """Answers the calls of one moment in reverse."""

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        for _ in range(4 - len(self.requests)):
            await settled()
        return completion


def test_calls_at_once_differ_in_seed_and_are_recorded_in_the_order_in_which_they_were_made() -> (
    None
):
    async def play(session: RecordingSession) -> None:
        first = await session.generate([5])
        start = [*first.prompt_ids, *first.response_ids]
        await asyncio.gather(session.generate(start), session.generate([*start, 70]))

    forward, backward = Engine(), Reversed()
    assert _record(forward, play) == _record(backward, play)
    seeds = [request.seed for request in backward.requests]
    assert seeds == [turn_seed(11, turn) for turn in range(3)]


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    engine = Engine()
    _record(engine, lambda session: session.generate([5], stop="END"))
    assert engine.requests[0].stop == ["END"]


def test_an_agent_may_go_on_with_the_list_that_it_handed_over() -> None:
    async def play(session: RecordingSession) -> None:
        tokens = [5]
        for _ in range(2):
            tokens += (await session.generate(tokens)).response_ids
        assert session.turns[0].prompt_ids == [5]

    (made,) = _record(Engine(), play)
    assert made.token_ids.tolist() == [5, 1000, 1001, 1002, 1003]


@pytest.mark.parametrize(
    ("token_ids", "max_new_tokens", "why"),
    [
        ("What is 1 + 1?", None, "not token ids"),
        ([5, "6"], None, "not token ids"),
        ([2**40], None, "not token ids"),
        ([5, 5000], None, "the model only has tokens 0 to 4999"),
        ([-1, 5], None, "the model only has tokens 0 to 4999"),
        ([5], 0, "at least one"),
        ([5], -1, "at least one"),
    ],
)
def test_what_cannot_be_sampled_is_the_agents_fault_and_reaches_no_engine(
    token_ids: list[int], max_new_tokens: int | None, why: str
) -> None:
    engine = Engine()
    with pytest.raises(AgentError) as refused:
        _record(engine, lambda session: session.generate(token_ids, max_new_tokens=max_new_tokens))
    assert why in refused.value.why
    assert not engine.requests


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=6))
def test_what_the_engine_was_given_and_gave_is_what_is_trained_on(
    moves: list[tuple[int, int]],
) -> None:
    """Each move goes on from some earlier turn, or from the start, with a few tokens between."""
    engine = Engine(length=3)

    async def play(session: RecordingSession) -> None:
        for back, extra in moves:
            start = [5]
            if back and back <= len(session.turns):
                turn = session.turns[-back]
                start = [*turn.prompt_ids, *turn.response_ids]
            await session.generate([*start, *range(50, 50 + extra)][: MAX_TOKENS - 3])

    made = _record(engine, play)
    sampled = [
        token
        for line in made
        for token, is_sampled in zip(line.token_ids, line.loss_mask, strict=True)
        if is_sampled
    ]
    assert sorted(sampled) == sorted(token for turn in engine.sampled for token in turn)
    whole = [line.token_ids.tolist() for line in made]
    for request, tokens in zip(engine.requests, engine.sampled, strict=True):
        seen = [*request.prompt_ids, *tokens]
        assert any(line[: len(seen)] == seen for line in whole), "a turn is in no trajectory"
