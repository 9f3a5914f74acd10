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
    Notice,
    OfAdapter,
    PhaseStarted,
    RunEnded,
    WarmupStepDone,
    stamped,
)
from milescli.core.history import History
from milescli.web import live
from milescli.web.asked import Asked
from milescli.web.histories import Histories
from milescli.web.live import LiveStreams, Seen, changes
from milescli.web.responses import Busy
from milescli.web.shown import ShownRun
from tests.console.fake_run import eval_done
from tests.web.serving import Serving, serving
from tests.web.written import WrittenRun, step_done

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
    id: str = ""
    seen: list[tuple[str, dict]] = field(default_factory=list)

    def next(self, kind: str) -> dict:
        """The next event of a kind; others before it are kept in `seen`."""
        name, until = "", time.monotonic() + WAIT_S
        for line in self.lines:
            assert time.monotonic() < until, f"no `{kind}`; seen: {self.seen}"  # it has heartbeats
            word, _, value = line.partition(": ")
            if word == "id":
                self.id = value
            elif word == "event":
                name = value
            elif word == "data":
                self.seen.append((name, json.loads(value)))
                if name == kind:
                    return self.seen[-1][1]
        raise AssertionError(f"the stream ended before `{kind}`: {self.seen}")


def follow(server: Serving, query: str = "", **headers: str):  # type: ignore[no-untyped-def]
    return server.client.stream(
        "GET", f"/api/runs/tiny-1/live{query}", headers=headers, timeout=WAIT_S
    )


def test_a_page_is_told_of_what_is_written(server: Serving, run: WrittenRun) -> None:
    run.attempt(engine_0="")
    run.steps(1, 2)
    with follow(server) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        page = Followed(stream.iter_lines())
        assert page.next("step") == {"step": 2, "num_steps": 40}
        run.tell(Notice(text="look </script>\n\nevent: end", level="warning"))
        told = page.next("notice")
        assert (told["kind"], told["level"]) == ("Notice", "warning")
        assert told["text"] == "look </script>\n\nevent: end"
        run.steps(3, 5)
        assert page.next("step")["step"] in (3, 4, 5)
        run.tell(RunEnded(outcome="done", step=5, seconds=40.0))
        assert page.next("end") == {"outcome": "done"}


def test_a_run_that_goes_on_is_followed_on(server: Serving, run: WrittenRun) -> None:
    run.attempt(engine_0="")
    run.steps(1, 6)
    run.tell(RunEnded(outcome="stopped", step=6, seconds=40.0))
    with follow(server) as stream:
        page = Followed(stream.iter_lines())
        assert page.next("step")["step"] == 6
        assert page.next("end") == {"outcome": "stopped"}
        run.attempt(engine_0="")
        run.tell(PhaseStarted(phase="start", detail="again"))
        assert page.next("notice")["text"] == "start: again"
        run.steps(4, 4)
        assert page.next("step")["step"] == 4
        run.tell(RunEnded(outcome="done", step=4, seconds=9.0))
        assert page.next("end") == {"outcome": "done"}


def test_events_that_begin_anew_are_told_of(server: Serving, run: WrittenRun) -> None:
    run.steps(1, 6)
    with follow(server) as stream:
        page = Followed(stream.iter_lines())
        page.next("step")
        run.run.events_file.unlink()
        run.tell(PhaseStarted(phase="start", detail="anew"))
        page.next("reset")
        assert page.next("notice")["text"] == "start: anew"


def test_a_page_that_was_cut_off_misses_nothing(server: Serving, run: WrittenRun) -> None:
    run.steps(1, 1)
    run.tell(Notice(text="one"))
    with follow(server) as stream:
        page = Followed(stream.iter_lines())
        page.next("step")
    run.tell(Notice(text="two"), Notice(text="three"))
    for query, headers in (("", {"last-event-id": page.id}), ("?notices=1", {})):
        with follow(server, query, **headers) as stream:
            again = Followed(stream.iter_lines())
            assert [again.next("notice")["text"], again.next("notice")["text"]] == ["two", "three"]


def test_a_driver_that_was_killed_is_an_end(server: Serving, run: WrittenRun) -> None:
    attempt = run.attempt(engine_0="")
    run.steps(1, 3)
    with (run.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with follow(server) as stream:
            page = Followed(stream.iter_lines())
            page.next("step")
            verdict_file(attempt).write_text('{"outcome": "killed"}\n')
            assert page.next("end") == {"outcome": "killed"}


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
        page.next("step")
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
            page.next("step")
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
    assert server.client.get("/api/runs/tiny-1/live?notices=x").status_code == 400


def test_a_backlog_is_cut_to_the_newest() -> None:
    history = History(name="tiny")
    for number in range(2 * live.MAX_NOTICES):
        history.feed({"event": "Notice", "text": str(number), "level": "info", "time": ""})
    events = changes(history, "running", Seen(notices=0))
    told = [event for event in events if b"event: notice" in event]
    assert len(told) == live.MAX_NOTICES and b'"text":"999"' in told[-1]
    assert changes(history, "running", Seen(notices=0, history=history))[:1] == told[:1]


def test_nothing_is_told_twice() -> None:
    history, seen = History(name="tiny"), Seen()
    assert [e.split(b"\n")[1] for e in changes(history, "failed", seen)] == [
        b"event: step",
        b"event: end",
    ]
    assert changes(history, "failed", seen) == []


def test_what_is_measured_beside_the_steps_is_news() -> None:
    history, seen = History(name="tiny"), Seen()
    history.feed(stamped(step_done(1)))
    changes(history, "running", seen)
    warmed = WarmupStepDone(step=1, num_steps=9, report=step_done(1).report, step_s=0.1)
    for event in (warmed, eval_done(1, 0.5)):
        history.feed(stamped(event))
        (news,) = changes(history, "running", seen)
        assert news.split(b"\n")[1] == b"event: step"
        assert changes(history, "running", seen) == []


def test_an_adapter_that_told_nothing_yet_does_not_begin_anew(run: WrittenRun) -> None:
    """At each look."""
    own, seen = WrittenRun(path=run.run.adapters_dir / "sums"), Seen()
    shown = ShownRun(id="tiny-1:sums", run=own.run, above=run.run)
    asked = Asked(shown=shown, histories=Histories())
    for expected in ([b"event: step"], [], []):
        with asked.history() as history:
            assert [e.split(b"\n")[1] for e in changes(history, "running", seen)] == expected
    run.tell(OfAdapter(adapter="sums", event=step_done(1)))
    with asked.history() as history:
        assert b'"step":1' in changes(history, "running", seen)[-1]


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
        asked = Asked(shown=ShownRun(id="tiny-1", run=run.run), histories=None)  # type: ignore
        stream = streams.open(asked, never)
        await asyncio.wait_for(stream({}, never, never), WAIT_S)

    asyncio.run(followed())
    monkeypatch.setattr(live, "MAX_STREAMS", 0)
    with pytest.raises(Busy):
        streams.open(None, never)  # type: ignore[arg-type]
