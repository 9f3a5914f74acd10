"""Why a run ended: of the files that it left."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from milescli.autopsy import why
from milescli.autopsy.why import find_why, kernel_lines, page, read_memory, write_why
from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.run_lock import lock
from milescli.core.errors import Interrupted, WorkerDied
from milescli.core.events import (
    CheckpointSaved,
    PhaseStarted,
    RunEnded,
    WorkerLost,
    WorkerReplaced,
    to_record,
)
from tests.fake_run import step_done

LOST = "engine {} died: its scheduler"


def _lost(number: int) -> WorkerLost:
    what = LOST.format(number)
    return WorkerLost(worker=f"engine {number}", what=what, why="SIGKILL", step=1, restart=1)


def _run(tmp_path: Path, *events: object, verdict: dict | None = None, attempts: int = 1) -> RunDir:
    run = RunDir(tmp_path / "one")
    for _ in range(attempts):
        run.new_attempt()
    run.recipe_file.write_text("")
    started = [PhaseStarted(phase="start", detail="2 engines"), *events]
    records = [
        {"time": f"2026-11-25T10:00:{second:02}Z", **to_record(event)}
        for second, event in enumerate(started)
    ]
    before = {"time": "2026-11-24T10:00:00Z", **to_record(_lost(7))}
    lines = [json.dumps(record) for record in [before, *records]]
    run.events_file.write_text("\n".join(lines) + "\n" + '{"event": "Step')
    if verdict is not None:
        (run.attempts()[-1] / "verdict.json").write_text(json.dumps(verdict))
    return run


def test_the_first_that_was_not_replaced_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    error = WorkerDied("engine 0 died during `generate`", why="no answer", fix="less log")
    run = _run(
        tmp_path,
        _lost(0),
        WorkerReplaced(worker="engine 0", step=1, seconds=5.0),
        step_done(1, 40, reward=0.5),
        step_done(2, 40, reward=0.5),
        CheckpointSaved(step=2, path="checkpoints/step_2", size_bytes=1, seconds=1.0),
        _lost(1),
        RunEnded(outcome="failed", step=2, seconds=9.0, error=error.as_dict()),
        verdict={"outcome": "failed", "step": 2, "error": error.as_dict()},
        attempts=2,
    )
    (run.attempts()[-1] / "engine-1-server.log").write_text("fine\nCUDA error: last words\n")
    why = find_why(run)
    assert (why.attempt, why.outcome, why.step, why.first) == (2, "failed", 2, "engine 1")
    assert why.first_log == str(run.attempts()[-1] / "engine-1-server.log")
    assert "last words" in why.last_lines
    told = [text for _, text in why.timeline]
    assert "engine 0 was back after 5.0 s" in told
    assert not any("engine 7" in text for text in told), "of another attempt"
    assert not any("step 1 of 40" in text for text in told) and "step 2 of 40 was done" in told
    assert why.next == ["less log", f"miles resume {run.shown}   # goes on from step 2"]
    text = page(why)
    assert text.index("cause") < text.index("engine 1, ") < text.index("next")
    # the kernel's lines, where this machine has some to tell, are cut at 200
    assert max(len(line) for line in text.splitlines()) <= 200


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ({"outcome": "done", "step": 40}, "one finished normally at step 40"),
        ({"outcome": "stopped", "step": 3}, "one was stopped by its user after step 3, and saved"),
        (
            {
                "outcome": "stopped",
                "step": 0,
                "error": Interrupted("x", why="y", fix="z").as_dict(),
            },
            "one was stopped by its user after step 0",
        ),
    ],
)
def test_where_nothing_went_wrong_it_is_one_line(tmp_path: Path, verdict: dict, said: str) -> None:
    run = _run(tmp_path, verdict=verdict)
    assert page(find_why(run)) == said
    assert write_why(run.attempts()[-1]) is None


def test_a_run_at_work_is_running_and_one_without_a_verdict_was_killed(tmp_path: Path) -> None:
    run = _run(tmp_path, step_done(1, 40, reward=0.5))
    with lock(run):
        assert page(find_why(run)) == "one is running"
        assert find_why(run, is_over=True).outcome == "killed"
    why = find_why(run)
    assert (why.outcome, why.step) == ("killed", 1)
    assert "the driver was killed" in page(why)


def test_a_damaged_record_hides_no_error(tmp_path: Path) -> None:
    run = _run(tmp_path, verdict={"outcome": "failed"})
    with run.events_file.open("a") as events:
        events.write('\n{"event": "StepDone"}\n')
    assert write_why(run.attempts()[-1]) is None
    run.events_file.unlink()
    file = write_why(run.attempts()[-1])
    assert file is not None and "failed at step 0" in file.read_text()


def test_the_watchdog_s_later_explanation_replaces_none_but_the_parent_s_does(
    tmp_path: Path,
) -> None:
    """The watchdog writes that the driver was killed, and explains it, while the driver's parent
    does so with the signal that it was sent."""
    run = _run(tmp_path, step_done(1, 40, reward=0.5), verdict={"outcome": "killed"})
    log_dir = run.attempts()[-1]
    first = write_why(log_dir, keep=True)
    assert first is not None and "the driver was killed" in first.read_text()
    error = WorkerDied("the driver died", why="was ended by SIGKILL", fix="").as_dict()
    (log_dir / "verdict.json").write_text(json.dumps({"outcome": "killed", "error": error}))
    assert write_why(log_dir) == first and "SIGKILL" in first.read_text()
    assert write_why(log_dir, keep=True) is None and "SIGKILL" in first.read_text()


def test_times_of_several_days_have_their_dates(tmp_path: Path) -> None:
    run = _run(tmp_path, step_done(1, 40, reward=0.5))
    ended = {
        "time": "2026-11-27T10:00:00Z",
        **to_record(RunEnded(outcome="killed", step=1, seconds=1.0)),
    }
    assert "\n  10:00:00  attempt began" in page(find_why(run))
    with run.events_file.open("a") as events:
        events.write("\n" + json.dumps(ended) + "\n")
    assert "\n  2026-11-25 10:00:00  attempt began" in page(find_why(run))
    assert "\n  2026-11-27 10:00:00  killed" in page(find_why(run))


def test_lines_that_name_a_cause_since_then_are_told() -> None:
    boot = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    records = [
        "6,1,1000000,-;Out of memory: Killed process 1 (before)\n",
        "6,2,5000000,-;eth0: link becomes ready\n",
        "3,3,6000000,-;Out of memory: Killed process 42 (python) total-vm:9kB\n SUBSYSTEM=x\n",
        "3,4,7000000,c;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n",
        "3,5,8000000,-;amdgpu 0000:03:00.0: amdgpu: RAS controller interrupt triggered\n",
    ]
    told = kernel_lines(boot + 4.0, records=records)
    assert told is not None
    assert [line.split(" ", 1)[1][:20] for line in told] == [
        "Out of memory: Kille",
        "NVRM: Xid (PCI:0000:",
        "amdgpu 0000:03:00.0:",
    ]


def test_what_is_no_kernel_s_log_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "kmsg"
    text.write_text("Out of memory\n" * 3000)
    for place in ("/dev/null", str(text)):
        monkeypatch.setattr(why, "LOG", place)
        assert kernel_lines(0.0) == []


def test_of_many_lines_the_last_are_told() -> None:
    records = [f"3,1,{n}000000,-;Out of memory: Killed process {n} (x)\n" for n in range(1, 21)]
    told = kernel_lines(0.0, records=records)
    assert told is not None
    assert [line.rpartition("process ")[2] for line in told] == [f"{n} (x)" for n in range(13, 21)]


def test_of_steps_only_the_last_is_a_moment_though_others_are_equal(tmp_path: Path) -> None:
    run = _run(tmp_path, *[step_done(1, 0.5)] * 3, verdict={"outcome": "failed"})
    lines = run.events_file.read_text().splitlines()
    same = [line.replace("10:00:02Z", "10:00:03Z") for line in lines]
    run.events_file.write_text("\n".join(same) + "\n")
    assert sum("step 1 of" in text for _, text in find_why(run).timeline) == 1


def test_the_curve_ends_with_the_last_look_and_kills_are_those_of_the_attempt(
    tmp_path: Path,
) -> None:
    looks = [
        {
            "time": 1.76e9 + 10 * i,
            "oom_kills": 4,
            "resident_bytes": {"11": i * 2**30, "12": 2**20, "13": 2**20},
            "names": {"11": "driver", "12": "engine-0-server", "13": "engine-0-server"},
        }
        for i in range(1, 101)
    ]
    end = {"time": 1.76e9 + 1002, "oom_kills": 5}
    text = "\n".join(json.dumps(record) for record in [*looks, end])
    (tmp_path / "memory.jsonl").write_text(text + "\n")
    memory = read_memory(tmp_path)
    assert [size >> 30 for _, size in memory.curve] == [1, 21, 41, 60, 80, 100]
    assert memory.peak == {"driver": 100 * 2**30, "engine-0-server": 2**21}
    assert memory.oom_kills == 1
    assert "100.0 GiB at" in memory.lines()[0]
    assert memory.lines()[-1].endswith("for lack of memory: 1")


def test_a_process_without_a_name_is_called_by_its_number(tmp_path: Path) -> None:
    look = {"time": 1.76e9, "resident_bytes": {"11": 7, "12": 5}, "names": {"11": "driver"}}
    (tmp_path / "memory.jsonl").write_text(json.dumps(look) + "\n")
    assert read_memory(tmp_path).peak == {"driver": 7, "12": 5}


def test_without_a_record_nothing_is_claimed(tmp_path: Path) -> None:
    memory = read_memory(tmp_path)
    assert (memory.curve, memory.peak, memory.oom_kills) == ([], {}, None)
    assert memory.lines() == []
