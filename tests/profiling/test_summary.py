"""A profile in words, and what is said where a part of it is missing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import MilesError
from milescli.profiling.request import Progress, Request, State, folder_of
from milescli.profiling.summary import summarise

WANTED = Request(number=1, steps=2, ranks=[0], engines=[0], memory=True)
TENSOR = {"what": "weights", "shape": "8x8", "dtype": "bfloat16", "device": "cuda:0"}
EVENTS = [
    {"name": "miles: an optimizer step", "cat": "user_annotation", "ts": 0, "dur": 3e6},
    {"name": "aten::mm", "cat": "cpu_op", "ts": 1e5, "dur": 2.5e6},
]
STACKS = "event_loop_normal (scheduler.py);on_idle (scheduler.py) 3\nevent_loop_normal (s.py) 1\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose rank 0 and engine 0 were looked at."""
    run = RunDir(tmp_path)
    folder = folder_of(run, 1)
    folder.mkdir(parents=True)
    with gzip.open(folder / "rank_0.json.gz", "wt") as file:
        json.dump({"traceEvents": [{"ph": "X", "tid": 1, **event} for event in EVENTS]}, file)
    (folder / "engine_0.stacks.txt").write_text(STACKS)
    return run


def _state(rank: dict[str, object], engine: dict[str, object]) -> State:
    return State(
        progress=Progress.DONE,
        first_step=3,
        last_step=4,
        seconds=4.0,
        ranks={"0": rank},
        engines={"0": engine},
    )


def test_shares_are_told_in_words_and_kept(run: RunDir) -> None:
    memory = {"tensors": [{**TENSOR, "count": 2, "size_bytes": 256}], "snapshot": "m.pickle"}
    rank = {"file": "rank_0.json.gz", "seconds": 5.0, "memory": memory}
    told = summarise(run, WANTED, _state(rank, {"file": "engine_0.stacks.txt"}))
    assert told.lines() == [
        "steps 3 to 4, 4.0 s",
        "rank 0: 50 % matmul (aten::mm 2.5 s), 40 % waiting for rollouts and the driver, "
        "10 % Python",
        "       256 B  weights, 2 of 8x8 bfloat16 on cuda:0",
        "engine 0: 75 % idle (on_idle (scheduler.py)), 25 % scheduler (event_loop_normal (s.py))",
        f"in {folder_of(run, 1)}: rank_0.json.gz, m.pickle, engine_0.stacks.txt",
    ]
    kept = json.loads((folder_of(run, 1) / "summary.json").read_text())
    assert kept["parts"][0]["shares"]["matmul"] == 0.5 and told.errors == []


def test_where_py_spy_may_not_look_the_ranks_are_there_alone(run: RunDir) -> None:
    rank = {"file": "rank_0.json.gz", "seconds": 4.0}
    told = summarise(run, WANTED, _state(rank, {"error": "py-spy: Permission Denied"}))
    told.require_some()
    assert told.warnings == told.errors == ["engine 0: py-spy: Permission Denied"]
    assert [line.split(":")[0] for line in told.lines()[1:2]] == ["rank 0"]


def test_a_trace_is_shown_where_memory_cannot_be(run: RunDir) -> None:
    rank = {"file": "rank_0.json.gz", "seconds": 4.0, "memory": {"error": "OSError: full"}}
    told = summarise(run, WANTED, _state(rank, {"file": "engine_0.stacks.txt"}))
    assert told.errors == [] and told.warnings == ["memory of rank 0: OSError: full"]


@pytest.mark.parametrize("keep", [0, 4, 40])
def test_a_profile_that_shows_nothing_is_an_error(run: RunDir, keep: int) -> None:
    trace = folder_of(run, 1) / "rank_0.json.gz"
    trace.write_bytes(trace.read_bytes()[:keep] or b"torn")
    rank = {"file": "rank_0.json.gz", "seconds": 4.0}
    told = summarise(run, WANTED, _state(rank, {"error": "replaced"}))
    assert "its trace cannot be read" in told.errors[0]
    with pytest.raises(MilesError, match="is empty") as refused:
        told.require_some()
    assert "engine 0: replaced" in refused.value.why
