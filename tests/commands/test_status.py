"""`miles status`: one screen, one object, one bare line; the newest run where none is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

from milescli.core.events import to_record
from tests.commands.conftest import Miles
from tests.commands.test_runs import make_run
from tests.insight.planted import Planted, line


def planted(name: str, run: Planted) -> Path:
    folder = make_run(name)
    records = (json.dumps(to_record(event)) + "\n" for _, event in run.events())
    (folder / "events.jsonl").write_text("".join(records))
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
    assert said.code == 6 and "there is no run yet" in said.err
    assert "miles launch --recipe quickstart" in said.err


def test_watching_a_run_that_has_ended_ends(miles: Miles) -> None:
    planted("one", Planted())
    said = miles("status", "one", "--watch")
    assert said.code == 0 and "It is learning" in said.out
