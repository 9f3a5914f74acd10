"""Code of the user's that the driver calls runs apart from it: what it does wrong is bounded and
named, and the driver goes on."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from milescli.core import user_code
from milescli.core.errors import RecipeError
from milescli.core.registry import PlugPoint
from milescli.workers import isolated
from milescli.workers.isolated import MAX_YIELDED, IsolatedPlugin, close_lanes, resolve_isolated
from milescli.workers.worker import UserWorker
from tests.waiting import assert_gone, until
from tests.workers import bad_code

ROOM = "tests.workers.bad_code"
PIECES = PlugPoint(
    kind="piece",
    key="train.piece",
    builtin={"ours": f"{ROOM}:good"},
    signature="(*, number) -> int",
)


@pytest.fixture(autouse=True)
def _ends_what_it_began() -> Iterator[None]:
    yield
    close_lanes()


def _processes() -> list[UserWorker]:
    """Of the lanes that have one."""
    return [lane.process for lane in isolated.lanes() if lane.process is not None]


def _piece(name: str, *, bound_s: float = 30.0) -> object:
    return resolve_isolated(PIECES, f"{ROOM}:{name}", bound_s=bound_s)


def test_the_users_runs_in_another_process_and_ours_in_this_one() -> None:
    assert resolve_isolated(PIECES, "ours") is bad_code.good
    assert _piece("good")(number=4) == 8
    counting = _piece("counting")
    assert [counting(number=2), counting(number=3)] == [2, 5]
    assert bad_code.COUNT == 0, "it was called here"
    assert _piece("counted")(number=0) == 5, "pieces do not share a process"
    assert counting.__name__ == "counting"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raising", "ZeroDivisionError"),
        ("exiting", "it raised SystemExit(3)"),
        ("interrupted", "it raised KeyboardInterrupt()"),
        ("leaving", "its process ended with exit code 1"),
        ("forking", "its process ended with signal SIGKILL"),
        ("closing", "its process ended with"),
        ("chatty", "it printed more than 8"),
        ("greedy", "MemoryError"),
        ("unpicklable", "which no other process can be given"),
    ],
)
def test_what_is_wrong_is_named(name: str, said: str) -> None:
    with pytest.raises(RecipeError, match=f"the piece `{ROOM}:{name}` failed") as refused:
        _piece(name)(number=1)
    assert said in refused.value.why
    assert _piece("good")(number=1) == 2, "what comes after it is not its victim"


@pytest.mark.parametrize("name", ["backtracking", "sleeping", "swallowing"])
def test_what_hangs_ends_at_its_bound_with_its_line(name: str) -> None:
    source = Path(bad_code.__file__).read_text().splitlines()
    begin = next(n for n, text in enumerate(source) if text.startswith(f"def {name}("))
    word = "fullmatch" if name == "backtracking" else "time.sleep"
    line = next(n for n in range(begin, len(source)) if word in source[n]) + 1
    with pytest.raises(RecipeError, match=f"`{ROOM}:{name}` did not return within 2 s") as refused:
        _piece(name, bound_s=2.0)(number=1)
    assert f'bad_code.py", line {line} in {name}' in refused.value.why


def test_an_endless_iterator_is_taken_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_piece("endless")(number=1)) == MAX_YIELDED


def test_an_object_keeps_its_state_there() -> None:
    counter = IsolatedPlugin(
        f"{ROOM}:Counter",
        what="the counter",
        plugin=bad_code.Counter(start=0),
        made_with={"start": 5},
        live=("state",),
    )
    assert counter.kind == "counter"
    assert counter.add(2) == 7 and counter.state == 7
    with pytest.raises(AttributeError):
        _ = counter.nothing


def test_two_objects_of_one_factory_do_not_share_what_they_hold() -> None:
    counters = [
        IsolatedPlugin(
            f"{ROOM}:Counter",
            what="the counter",
            plugin=bad_code.Counter(start=0),
            made_with={"start": start},
            live=("state",),
        )
        for start in (5, 50)
    ]
    assert [counter.add(1) for counter in counters] == [6, 51]
    assert [counter.state for counter in counters] == [6, 51]


def test_it_goes_where_its_caller_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its folder is gone, oneMKL would end it at its first product."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    assert _piece("folder")(number=0) == str(first)
    monkeypatch.chdir(second)
    first.rmdir()
    assert _piece("folder")(number=0) == str(second)


def test_a_process_that_ended_between_two_calls_is_not_replaced_in_silence() -> None:
    counting = _piece("counting")
    counting(number=2)
    (process,) = _processes()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RecipeError, match="bad_code:counting` failed") as refused:
        counting(number=3)
    assert "its process ended with signal SIGKILL" in refused.value.why


def test_lanes_do_not_wait_for_each_other_and_leave_nothing_behind() -> None:
    slow = resolve_isolated(replace(PIECES, lane="slow"), f"{ROOM}:sleeping")
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(lambda: slow(number=1))
        try:
            assert _piece("good")(number=1) == 2
            until(lambda: len(_processes()) == 2, "the process of the slow lane")
            assert not waiting.done()
            pids = [process.pid for process in _processes()]
        finally:
            for process in _processes():
                process.end()
        with pytest.raises(RecipeError):
            waiting.result()
    close_lanes()
    assert_gone(*pids)


def test_nested_calls_stay_in_the_process() -> None:
    assert not user_code.in_user_process
    there = IsolatedPlugin(f"{__name__}:nested", what="it", plugin=nested)
    mine, inner = there()
    assert mine == inner != os.getpid()


def nested() -> tuple[int, int]:
    """Its own process, and that of a piece which it calls."""
    inner = resolve_isolated(PIECES, f"{__name__}:pid")
    return os.getpid(), inner(number=1)


def pid(*, number: int) -> int:
    """Where it runs."""
    return os.getpid()
