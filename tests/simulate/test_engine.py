"""One event for each response is exact: it ends when a loop over tokens says so."""

from __future__ import annotations

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from milescli.simulate.engine import Engine, EngineSpeed, Fleet, Group, Request

speeds = st.builds(
    EngineSpeed,
    step_s=st.floats(1e-4, 0.1),
    request_s=st.floats(0, 1e-2),
    context_s=st.floats(0, 1e-5),
    slots=st.integers(1, 4),
)
requests = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 60)), min_size=1, max_size=8)
"""(tokens of the prompt, tokens of the response) of each."""


def ends_by_tokens(speed: EngineSpeed, wanted: list[tuple[int, int]]) -> list[float]:
    """When each response ends, in the order of the requests: a loop over decode steps."""
    waiting, running = list(enumerate(wanted)), dict[int, list[int]]()
    ends, now = [0.0] * len(wanted), 0.0
    while waiting or running:
        while waiting and len(running) < speed.slots:
            number, (prompt, response) = waiting.pop(0)
            running[number] = [prompt, response]
        context = sum(one[0] for one in running.values())
        now += speed.step_s + speed.request_s * len(running) + speed.context_s * context
        for number, one in list(running.items()):
            one[0] += 1
            one[1] -= 1
            if one[1] == 0:
                ends[number] = now
                del running[number]
    return ends


class Fixture:
    """One engine that keeps when its requests end."""

    def __init__(self, speed: EngineSpeed, slowness: float = 1.0) -> None:
        self.env, self.fleet = simpy.Environment(), Fleet()
        self.ends: dict[int, float] = {}
        self.engine = Engine(self.env, speed, self.ended, self.fleet, 0, slowness)
        self.fleet.engines.append(self.engine)
        self.fleet.note(self.engine)

    def ended(self, engine: Engine, request: Request) -> None:
        self.ends[request.group.number] = self.env.now
        engine.fleet.note(engine)

    def submit(self, number: int, prompt: float, response: float, prefill: float = 0.0) -> Request:
        request = Request(Group(number, (int(response),)), prompt, response, prefill)
        assert self.fleet.submit(request)
        return request


@given(speed=speeds, wanted=requests)
def test_responses_end_when_a_loop_over_tokens_ends_them(
    speed: EngineSpeed, wanted: list[tuple[int, int]]
) -> None:
    own = Fixture(speed)
    for number, (prompt, response) in enumerate(wanted):
        own.submit(number, prompt, response)
    own.fleet.flush()
    own.env.run()
    expected = ends_by_tokens(speed, wanted)
    assert [own.ends[number] for number in range(len(wanted))] == pytest.approx(expected, rel=1e-9)
    assert own.engine.num_events <= len(wanted), "more than one event for a response"
    assert own.engine.busy_s == pytest.approx(max(expected))


@given(speed=speeds, tokens=st.floats(0, 1e5), batch=st.integers(1, 500))
def test_tokens_are_the_inverse_of_seconds(speed: EngineSpeed, tokens: float, batch: int) -> None:
    context = batch * 100.0
    seconds = speed.seconds(tokens, batch=batch, context=context)
    assert speed.tokens(seconds, batch=batch, context=context) == pytest.approx(tokens, rel=1e-9)


@given(speed=speeds, wanted=requests, at=st.floats(0, 1), pause=st.floats(0, 5))
def test_a_publication_delays_by_its_pause_and_the_prefill_of_what_runs(
    speed: EngineSpeed, wanted: list[tuple[int, int]], at: float, pause: float
) -> None:
    plain, paused = Fixture(speed), Fixture(speed)
    for own in (plain, paused):
        for number, (prompt, response) in enumerate(wanted):
            own.submit(number, prompt, response)
        own.fleet.flush()
    plain.env.run()
    moment = at * max(plain.ends.values())
    paused.env.run(until=moment + 1e-12)
    paused.engine.pause()
    paused.env.run(until=paused.env.now + pause + 1e-12)
    paused.engine.resume(1, restarts=False)
    paused.env.run()
    for number, end in plain.ends.items():
        shift = pause if end > moment + 1e-9 else 0.0
        assert paused.ends[number] == pytest.approx(end + shift, rel=1e-6, abs=1e-6)


def test_a_prefill_delays_all_that_runs() -> None:
    speed = EngineSpeed(step_s=0.1, prefill_s=0.01)
    own = Fixture(speed)
    own.submit(0, 50, 10, prefill=50)
    own.fleet.flush()
    own.env.run()
    assert own.ends == {0: pytest.approx(50 * 0.01 + 10 * 0.1)}


def test_what_does_not_fit_into_the_cache_waits() -> None:
    own = Fixture(EngineSpeed(step_s=1.0, cache_tokens=100))
    for number in range(3):
        own.submit(number, 30, 10)  # takes 35: two fit
    own.fleet.flush()
    own.env.run()
    assert own.ends == {0: 10.0, 1: 10.0, 2: 20.0}


def test_a_straggler_takes_longer_by_its_factor() -> None:
    own = Fixture(EngineSpeed(step_s=1.0, prefill_s=0.5), slowness=1.5)
    own.submit(0, 4, 10, prefill=4)
    own.fleet.flush()
    own.env.run()
    assert own.ends == {0: pytest.approx(1.5 * 12)}


def test_an_engine_that_dies_loses_what_it_made_since_the_last_publication() -> None:
    own = Fixture(EngineSpeed(step_s=1.0))
    own.submit(0, 7, 20)
    own.fleet.flush()
    own.env.run(until=6)
    own.engine.pause()
    own.engine.resume(1, restarts=False)
    own.env.run(until=10)
    (lost,) = own.engine.fail()
    assert (lost.made, lost.left, lost.prefill) == (6, 14, 13)
    assert own.engine.num_open == 0 and not own.fleet.submit(lost)
    own.env.run()
    assert own.ends == {}


def test_abort_begins_anew_what_runs() -> None:
    own = Fixture(EngineSpeed(step_s=1.0))
    own.submit(0, 7, 20)
    own.fleet.flush()
    own.env.run(until=6)
    own.engine.pause()
    own.engine.resume(1, restarts=True)
    own.env.run()
    assert own.ends == {0: 26.0}


def test_requests_go_to_the_engine_with_the_fewest() -> None:
    own = Fixture(EngineSpeed(step_s=1.0))
    other = Engine(own.env, own.engine.speed, own.ended, own.fleet, 1)
    own.fleet.engines.append(other)
    own.fleet.note(other)
    for number in range(5):
        own.submit(number, 1, 10 + number)
    assert (own.engine.num_open, other.num_open) == (3, 2)
    own.fleet.flush()
    own.env.run()
    assert len(own.ends) == 5 and (own.engine.num_open, other.num_open) == (0, 0)
