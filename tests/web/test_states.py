"""The list of runs, by the ends of their events."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from milescli.checkpoint.run_dir import verdict_file
from milescli.core.events import EvalDone, Notice
from milescli.web import states
from milescli.web.shown import ShownRun
from milescli.web.states import States
from tests.web.written import WrittenRun, row_step_done, step_done


def evaluation(step: int, accuracy: float) -> EvalDone:
    return EvalDone(
        step=step,
        accuracy=accuracy,
        num_prompts=8,
        truncated_fraction=0.0,
        response_tokens_mean=9.0,
        seconds=2.0,
        path=f"eval/step_{step}.jsonl",
    )


def only(client: TestClient) -> dict:
    [told] = client.get("/api/runs").json()["runs"]
    return told


def test_a_run_in_the_list(run: WrittenRun, client: TestClient) -> None:
    assert only(client) | {"changed": "", "changed_s": 0} == {
        "id": "tiny-1",
        "name": "tiny-1",
        "folder": str(run.path),
        "state": "not started",
        "step": 0,
        "num_steps": None,
        "reward": None,
        "accuracy": None,
        "changed": "",
        "changed_s": 0,
        "adapters": [],
    }
    run.tell(evaluation(0, 0.25))
    run.steps(1, 3, reward=0.75)
    told = only(client)
    assert (told["step"], told["num_steps"]) == (3, 40)
    assert (told["reward"], told["accuracy"]) == (0.75, 0.25)
    assert told["changed_s"] == pytest.approx(run.run.events_file.stat().st_mtime)


def test_a_run_runs_while_its_driver_holds_it(run: WrittenRun, client: TestClient) -> None:
    attempt = run.attempt(engine_0="")
    with (run.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert only(client)["state"] == "running"
    assert only(client)["state"] == "killed"
    verdict_file(attempt).write_text('{"outcome": "failed"}\n')
    assert only(client)["state"] == "failed"


def test_the_newest_step_counts_after_a_resume(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 9)
    assert only(client)["step"] == 9
    run.steps(4, 5)
    assert only(client)["step"] == 5
    run.run.events_file.unlink()
    run.tell(row_step_done(1))
    assert (only(client)["step"], only(client)["reward"]) == (1, None)


def test_text_that_looks_like_an_event_is_none(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 1)
    run.tell(Notice(text='{"event": "StepDone", "step": 99}'), Notice(text='"StepDone"'))
    assert only(client)["step"] == 1


SIZES = st.lists(st.sampled_from(["step", "eval", "notice", "torn"]), min_size=1, max_size=25)


@settings(max_examples=25)
@given(kinds=SIZES, looks=st.sets(st.integers(0, 25)))
def test_reading_on_says_what_reading_all_says(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], looks: set[int]
) -> None:
    """Whatever the blocks, and whenever it was looked at."""
    run = WrittenRun(path=tmp_path_factory.mktemp("states") / "tiny-1")
    shown, held = ShownRun(id="tiny-1", run=run.run), States()
    step, accuracy = 0, None
    before = states.BLOCK_BYTES
    states.BLOCK_BYTES = 700
    try:
        for number, kind in enumerate(kinds, 1):
            if kind == "step":
                step = number
                run.tell(step_done(number))
            elif kind == "eval":
                accuracy = number / 100
                run.tell(evaluation(number, accuracy))
            elif kind == "notice":
                run.tell(Notice(text="x" * 900))
            else:
                with run.run.events_file.open("a") as file:
                    file.write(json.dumps({"event": "StepDone"})[:-3] + "\n")
            if number in looks:
                held.of(shown)
        told = held.of(shown)
    finally:
        states.BLOCK_BYTES = before
    assert (told["step"], told["accuracy"]) == (step, accuracy)


def test_a_line_that_is_still_written_counts_when_it_is_whole(
    run: WrittenRun, client: TestClient
) -> None:
    run.steps(1, 2)
    whole = run.run.events_file.read_bytes()
    run.run.events_file.write_bytes(whole[:-30])
    assert only(client)["step"] == 1
    run.run.events_file.write_bytes(whole)
    assert only(client)["step"] == 2


def test_new_runs_show_up_by_themselves(
    run: WrittenRun, folder: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("milescli.web.shown.LOOK_EVERY_S", 0.0)
    assert only(client)["id"] == "tiny-1"
    WrittenRun(path=folder / "tiny-2")
    (folder / "no-run").mkdir()
    listed = client.get("/api/runs").json()["runs"]
    assert {one["id"] for one in listed} == {"tiny-1", "tiny-2"}
