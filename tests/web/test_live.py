"""What a page is told as it happens: over real connections, of files that grow."""

from __future__ import annotations

import asyncio
import fcntl
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import verdict_file
from milescli.core.events import (
    AdapterEvent,
    Notice,
    PhaseStarted,
    RunEnded,
    WarmupStepDone,
    stamped,
)
from milescli.core.history import History
from milescli.web import live
from milescli.web.histories import Histories
from milescli.web.live import LiveStreams, progress_state
from milescli.web.responses import Busy
from milescli.web.run_request import RunRequest
from milescli.web.shown import ShownRun
from tests.fake_run import WrittenRun, eval_done, step_done
from tests.web.serving import Serving, serving

WAIT_S = 60.0


@pytest.fixture
def server(folder: Path, run: WrittenRun) -> Iterator[Serving]:
    """Of a real socket."""
    with serving(folder) as server:
        yield server


@dataclass
class Followed:
    """A page that follows a run."""

    lines: Iterator[str]
    seen: list[dict] = field(default_factory=list)

    def until(self, **wanted: object) -> dict:
        """Read until there is news with these values; those before it are kept in `seen`."""
        deadline = time.monotonic() + WAIT_S
        for line in self.lines:
            assert time.monotonic() < deadline, f"no {wanted}; seen: {self.seen}"
            word, _, value = line.partition(": ")
            if word == "event":
                assert value == "news"
            elif word == "data":
                self.seen.append(json.loads(value))
                if wanted.items() <= self.seen[-1].items():
                    return self.seen[-1]
        raise AssertionError(f"the stream ended before {wanted}: {self.seen}")


def follow(server: Serving):  # type: ignore[no-untyped-def]
    return server.client.stream("GET", "/api/runs/tiny-1/live", timeout=WAIT_S)


def test_a_page_is_told_of_what_is_written(server: Serving, run: WrittenRun) -> None:
    run.attempt(engine_0="")
    run.steps(1, 2)
    with follow(server) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        page = Followed(stream.iter_lines())
        told = page.until(step=2)
        assert told == {"step": 2, "num_steps": 40, "state": "killed"}  # nobody holds its lock
        run.tell(Notice(text="look </script>\n\nevent: end", level="warning"))
        page.until(step=2)
        run.steps(3, 5)
        page.until(step=5)
        run.tell(RunEnded(outcome="done", step=5, seconds=40.0))
        page.until(step=5, state="done")


def test_a_run_that_goes_on_is_followed_on(server: Serving, run: WrittenRun) -> None:
    run.attempt(engine_0="")
    run.steps(1, 6)
    run.tell(RunEnded(outcome="stopped", step=6, seconds=40.0))
    with follow(server) as stream:
        page = Followed(stream.iter_lines())
        page.until(step=6, state="stopped")
        run.attempt(engine_0="")
        run.tell(PhaseStarted(phase="start", detail="again"))
        page.until(step=6, state="killed")
        run.steps(4, 4)
        page.until(step=4)
        run.tell(RunEnded(outcome="done", step=4, seconds=9.0))
        page.until(step=4, state="done")


def test_events_that_begin_anew_are_news(server: Serving, run: WrittenRun) -> None:
    run.steps(1, 6)
    with follow(server) as stream:
        page = Followed(stream.iter_lines())
        page.until(step=6)
        run.run.events_file.unlink()
        run.tell(PhaseStarted(phase="start", detail="anew"))
        page.until(step=0)


def test_a_page_that_comes_again_is_told_where_the_run_is(server: Serving, run: WrittenRun) -> None:
    for _ in range(2):
        run.steps(1, 1)
        with follow(server) as stream:
            Followed(stream.iter_lines()).until(step=1)


def test_a_driver_that_was_killed_is_an_end(server: Serving, run: WrittenRun) -> None:
    attempt = run.attempt(engine_0="")
    run.steps(1, 3)
    with (run.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with follow(server) as stream:
            page = Followed(stream.iter_lines())
            page.until(step=3)
            verdict_file(attempt).write_text('{"outcome": "killed"}\n')
            page.until(state="killed")


def test_a_silent_stream_shows_that_it_lives(
    folder: Path, run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.5)
    with serving(folder) as server, follow(server) as stream:
        assert any(line == ": alive" for line in stream.iter_lines())


def test_a_stream_ends_with_its_server(folder: Path, run: WrittenRun) -> None:
    run.steps(1, 1)
    with serving(folder) as server, follow(server) as stream:
        page = Followed(stream.iter_lines())
        page.until(step=1)
        server.stop()
        assert list(page.lines) == [""]  # ends the event before


def test_so_many_streams_and_no_more(
    folder: Path, run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS", 1)
    run.steps(1, 1)
    with serving(folder) as server:
        with follow(server) as stream:
            page = Followed(stream.iter_lines())  # held: a line reader that is gone ends the stream
            page.until(step=1)
            with follow(server) as refused:
                assert refused.status_code == 503
                assert set(json.loads(refused.read())) == {"what", "why", "fix"}
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:  # the place is free again, soon
            with follow(server) as stream:
                if stream.status_code == 200:
                    return
        raise AssertionError("a page that left still counts")


def test_a_run_that_is_not_there_has_no_stream(server: Serving) -> None:
    assert server.client.get("/api/runs/tiny-2/live").status_code == 404


def test_nothing_is_told_twice_and_whatever_a_page_draws_is_news() -> None:
    history = History(name="tiny")
    known = progress_state(history, "running")
    assert progress_state(history, "running") == known != progress_state(history, "failed")
    warmed = WarmupStepDone(step=1, num_steps=9, report=step_done(1).report, step_s=0.1)
    for event in (step_done(1), warmed, eval_done(1, 0.5), Notice(text="look")):
        history.feed(stamped(event))
        assert progress_state(history, "running") != known
        known = progress_state(history, "running")
        assert progress_state(history, "running") == known


def test_what_one_of_several_adapters_does_is_news() -> None:
    history = History(name="many")
    known = progress_state(history, "running")
    for event in (step_done(1), step_done(2), eval_done(2, 0.5), Notice(text="look")):
        history.feed(stamped(AdapterEvent(adapter="sums", event=event)))
        assert progress_state(history, "running") != known
        known = progress_state(history, "running")


def test_an_adapter_that_told_nothing_yet_does_not_begin_anew(run: WrittenRun) -> None:
    """At each look."""
    own = WrittenRun(path=run.run.adapters_dir / "sums")
    shown = ShownRun(id="tiny-1:sums", run=own.run, parent=run.run)
    stream = LiveStreams().open(RunRequest(shown=shown, histories=Histories()), None)  # type: ignore
    assert [bool(stream.next_event()) for _ in range(3)] == [True, False, False]
    run.tell(AdapterEvent(adapter="sums", event=step_done(1)))
    assert b'"step":1' in stream.next_event() and not stream.next_event()


def test_a_page_that_takes_nothing_is_given_up(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would hold its place for ever."""
    monkeypatch.setattr(live, "SEND_S", 0.1)
    streams = LiveStreams()

    async def never(*_: object) -> dict:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def followed() -> None:
        asked = RunRequest(shown=ShownRun(id="tiny-1", run=run.run), histories=None)  # type: ignore
        stream = streams.open(asked, never)
        await asyncio.wait_for(stream({}, never, never), WAIT_S)

    asyncio.run(followed())
    monkeypatch.setattr(live, "MAX_STREAMS", 0)
    with pytest.raises(Busy):
        streams.open(None, never)  # type: ignore[arg-type]
