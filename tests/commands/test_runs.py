"""Runs are found by name or path, and listed with what they reached."""

from __future__ import annotations

import json
import os
from pathlib import Path

from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.run_lock import lock
from milescli.core.events import RunEnded, to_record
from tests.commands.conftest import Miles
from tests.fake_run import eval_done, step_done


def make_run(
    name: str, *, outcome: str | None = None, steps: int = 0, folder: Path = Path("runs")
) -> Path:
    run = folder / name
    (run / "logs" / "attempt_1").mkdir(parents=True)
    (run / "recipe.yaml").write_text("")
    events = [step_done(step, 40, reward=0.5 + step / 100) for step in range(1, steps + 1)]
    records = [to_record(event) for event in [*events, eval_done(steps, 0.75)]] if steps else []
    if outcome:
        records.append(to_record(RunEnded(outcome=outcome, step=steps, seconds=1.0)))
        (run / "logs" / "attempt_1" / "verdict.json").write_text(json.dumps({"outcome": outcome}))
    (run / "events.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records) + '{"event": "half a li'
    )
    return run


def test_runs_are_listed_with_what_they_reached(miles: Miles) -> None:
    make_run("first", outcome="done", steps=20)
    make_run("second", steps=3)
    make_run("third", outcome="killed")
    make_run("fourth", steps=3)
    with lock(RunDir(Path("runs/second"))):
        said = miles("runs").out
    rows = {line.split()[0]: line.split()[1:-2] for line in said.splitlines()[1:]}
    assert rows == {
        "first": ["done", "20/40", "0.700", "75.0%"],
        "second": ["running", "3/40", "0.530", "75.0%"],
        "third": ["killed", "0", "-", "-"],
        "fourth": ["killed", "3/40", "0.530", "75.0%"],
    }
    listed = json.loads(miles("runs", "--json").out)["runs"]
    steps = {run["name"]: run["step"] for run in listed}
    assert steps == {"first": 20, "second": 3, "third": 0, "fourth": 3}


def test_newest_comes_first(miles: Miles) -> None:
    for age, name in ((300, "old"), (100, "new"), (200, "middle")):
        os.utime(make_run(name) / "recipe.yaml", (1e9 - age, 1e9 - age))
    assert [line.split()[0] for line in miles("runs").out.splitlines()[1:]] == [
        "new",
        "middle",
        "old",
    ]


def test_without_runs_it_says_how_to_start_one(miles: Miles) -> None:
    said = miles("runs")
    assert said.code == 0 and said.out == "" and "miles launch --recipe quickstart" in said.err


def test_the_attempts_are_counted_not_sorted_as_text(miles: Miles) -> None:
    run = make_run("many", outcome="failed")
    for number in range(2, 12):
        (run / "logs" / f"attempt_{number}").mkdir()
    (run / "logs" / "attempt_11" / "verdict.json").write_text('{"outcome": "done"}')
    assert "done" in miles("runs").out


def test_a_run_that_is_not_there_is_refused_with_its_neighbour(miles: Miles) -> None:
    make_run("quickstart-1")
    said = miles("eval", "quickstrat-1")
    assert (
        said.code == 6 and "no run `quickstrat-1`" in said.err and "use `quickstart-1`" in said.err
    )


def test_a_folder_that_is_no_run_is_refused(miles: Miles) -> None:
    Path("notes").mkdir()
    said = miles("resume", "notes")
    assert said.code == 6 and "`notes` is not a run" in said.err and "recipe.yaml" in said.err


def test_the_runs_folder_follows_the_environment(miles: Miles, monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    make_run("elsewhere-1", folder=tmp_path / "data")
    monkeypatch.setenv("MILES_RUN__DIR", str(tmp_path / "data"))
    assert "elsewhere-1" in miles("runs").out
