"""How far runs came, by the ends of their events, and whether they go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.events import Notice
from milescli.insight import run_state
from milescli.insight.run_state import RunState, RunStates
from tests.fake_run import WrittenRun, eval_done, row_step_done, step_done


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    """Nothing has happened in it yet."""
    return WrittenRun(path=tmp_path / "tiny-1")


def test_a_run_in_a_list(run: WrittenRun) -> None:
    states = RunStates()
    assert states.of(run.run) == RunState(
        name="tiny-1",
        state="not started",
        step=0,
        num_steps=None,
        reward=None,
        accuracy=None,
        changed_s=run.path.stat().st_mtime,
    )
    run.tell(eval_done(0, 0.25))
    run.steps(1, 3, reward=0.75)
    told = states.of(run.run)
    assert (told.step, told.num_steps, told.reward, told.accuracy) == (3, 40, 0.75, 0.25)
    assert told.changed_s == run.run.events_file.stat().st_mtime


def test_a_run_that_is_gone_is_listed_as_far_as_it_is_known(run: WrittenRun) -> None:
    states = RunStates()
    run.steps(1, 2)
    states.of(run.run)
    run.run.events_file.unlink()
    run.run.recipe_file.unlink()
    run.path.rmdir()
    told = states.of(run.run)
    assert (told.state, told.step, told.changed_s) == ("not started", 2, None)


def test_a_folder_of_logs_that_is_not_ours_hides_no_other_run(run: WrittenRun) -> None:
    run.attempt(engine_0="").rename(run.path / "logs" / "attempt_old")
    assert RunStates().of(run.run).state == "not started"


def test_the_newest_step_counts_after_a_resume(run: WrittenRun) -> None:
    states = RunStates()
    run.steps(1, 9)
    assert states.of(run.run).step == 9
    run.steps(4, 5)
    assert states.of(run.run).step == 5
    run.run.events_file.unlink()
    run.tell(row_step_done(1))
    told = states.of(run.run)
    assert (told.step, told.reward) == (1, None)


def test_text_that_looks_like_an_event_is_none(run: WrittenRun) -> None:
    run.steps(1, 1)
    run.tell(Notice(text='{"event": "StepDone", "step": 99}'), Notice(text='"StepDone"'))
    assert RunStates().of(run.run).step == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"event": "StepDone", "step": 3},
        {"event": "StepDone", "step": "three", "num_steps": 40},
        {"event": "StepDone", "step": 3, "num_steps": 40, "rollout": []},
        {"event": "EvalDone", "step": 3},
    ],
    ids=str,
)
def test_a_damaged_record_hides_neither_the_ones_before_nor_other_runs(
    run: WrittenRun, fields: dict[str, object]
) -> None:
    run.steps(1, 2, reward=0.75)
    run.tell(eval_done(2, 0.25))
    with run.run.events_file.open("a") as file:
        file.write(json.dumps(fields) + "\n")
    told = RunStates().of(run.run)
    assert (told.step, told.num_steps, told.reward, told.accuracy) == (2, 40, 0.75, 0.25)


SIZES = st.lists(st.sampled_from(["step", "eval", "notice", "torn"]), min_size=1, max_size=25)


@settings(max_examples=25)
@given(kinds=SIZES, looks=st.sets(st.integers(0, 25)))
def test_reading_on_says_what_reading_all_says(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], looks: set[int]
) -> None:
    """Whatever the blocks, and whenever it was looked at."""
    run = WrittenRun(path=tmp_path_factory.mktemp("states") / "tiny-1")
    held = RunStates()
    step, accuracy = 0, None
    before = run_state.BLOCK_BYTES
    run_state.BLOCK_BYTES = 700
    try:
        for number, kind in enumerate(kinds, 1):
            if kind == "step":
                step = number
                run.tell(step_done(number))
            elif kind == "eval":
                accuracy = number / 100
                run.tell(eval_done(number, accuracy))
            elif kind == "notice":
                run.tell(Notice(text="x" * 900))
            else:
                with run.run.events_file.open("a") as file:
                    file.write(json.dumps({"event": "StepDone"})[:-3] + "\n")
            if number in looks:
                held.of(run.run)
        told = held.of(run.run)
    finally:
        run_state.BLOCK_BYTES = before
    assert (told.step, told.accuracy) == (step, accuracy)


def test_a_line_that_is_still_written_counts_when_it_is_whole(run: WrittenRun) -> None:
    states = RunStates()
    run.steps(1, 2)
    whole = run.run.events_file.read_bytes()
    run.run.events_file.write_bytes(whole[:-30])
    assert states.of(run.run).step == 1
    run.run.events_file.write_bytes(whole)
    assert states.of(run.run).step == 2
