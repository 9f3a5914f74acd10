"""`miles status`: one screen, one object, one bare line; the newest run where none is named."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.run_lock import lock
from milescli.commands.show import status as show_status
from milescli.core.events import to_record
from tests.commands.conftest import Miles
from tests.commands.test_runs import make_run
from tests.insight.planted import Planted, line


def planted(name: str, run: Planted) -> Path:
    folder = make_run(name)
    with (folder / "events.jsonl").open("w") as file:
        for time_s, event in run.events():
            when = datetime.fromtimestamp(time_s, UTC).isoformat()
            file.write(json.dumps({"time": when, **to_record(event)}) + "\n")
    return folder


def test_a_screen_says_the_verdict_first(miles: Miles) -> None:
    flat = {"reward": (line(0.3, 0.3), 0.03), "accuracy": (line(0.3, 0.3), 0.0)}
    planted("one", Planted(courses=flat))
    said = miles("status", "one")
    assert said.code == 0 and said.err == ""
    shown = said.out.splitlines()
    assert shown[0] == "one   done" and shown[1].startswith("step 80/80")
    assert shown[3].startswith("It is not learning: reward 0.3")
    assert "(reward-flat)" in said.out and "try: " in said.out


def test_programs_get_an_object_and_scripts_a_line(miles: Miles) -> None:
    planted("one", Planted())
    told = json.loads(miles("status", "one", "--json").out)
    assert (told["kind"], told["state"], told["step"]) == ("status", "done", 80)
    assert told["verdict"]["is_learning"] is True
    assert miles("status", "one", "-q").out.startswith("one\tdone\t80/80\tIt is learning")


def test_the_newest_run_is_shown_where_none_is_named(miles: Miles) -> None:
    for age, name in ((300, "old"), (100, "new")):
        os.utime(make_run(name) / "recipe.yaml", (1e9 - age, 1e9 - age))
    assert miles("status", "-q").out.startswith("new\t")


def test_without_a_run_it_says_how_to_start_one(miles: Miles) -> None:
    said = miles("status")
    assert said.code == 6 and "there are no runs yet" in said.err
    assert "miles launch --recipe quickstart" in said.err


def test_watching_a_run_that_has_ended_ends(miles: Miles) -> None:
    planted("one", Planted())
    said = miles("status", "one", "--watch")
    assert said.code == 0 and "It is learning" in said.out


def test_watching_tells_of_a_run_that_falls_silent(
    miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose driver somebody stopped; a script reads no screen that is redrawn."""
    course = Planted(ends=False)
    run = RunDir(planted("one", course))
    last_s = max(time_s for time_s, _ in course.events())
    clock = SimpleNamespace(time=lambda: last_s + 1)
    monkeypatch.setattr("milescli.insight.summary.time", clock)
    looks = iter([1, 2, 600, 601])

    def sleep(_: float) -> None:
        if (look := next(looks, None)) is None:
            (run.path / "logs/attempt_1/verdict.json").write_text('{"outcome": "killed"}')
        else:
            clock.time = lambda: last_s + look

    monkeypatch.setattr(show_status.time, "sleep", sleep)
    with lock(run):
        said = miles("status", "one", "--watch", "-q").out.splitlines()
    assert [line.split("\t")[1] for line in said] == ["running", "running", "killed"]
    assert ["been silent for a long time" in line for line in said] == [False, True, False]
