"""A run on one screen: figures of the newest steps, an honest time that is left, its state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.run_lock import lock
from milescli.insight.facts import RunFacts, read_facts
from milescli.insight.memory import memory_of, planned_bytes
from milescli.insight.summary import mfu_of, summarize
from milescli.models.costs import TokenFlops
from tests.insight.planted import Planted, line


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "recipe.yaml").write_text("train:\n  steps: 100\neval:\n  every: 10\n")
    (tmp_path / "logs/attempt_1").mkdir(parents=True)
    return RunDir(tmp_path)


def test_a_run_that_goes_on_says_what_is_left_with_its_spread(run: RunDir) -> None:
    history = Planted(steps=100, ends=False, eval_every=10).history()
    history.num_steps = 140
    with lock(run):
        summary = summarize(run, history, read_facts(run), now_s=history.last_s + 1)
    assert summary.state == "running"
    left = summary.left
    assert left is not None
    # 40 steps of 11.6 s, and 4 evaluations of 2 s
    assert left.mean_s == pytest.approx(40 * 11.6 + 8, rel=0.05)
    assert left.low_s < left.mean_s < left.high_s < 1.5 * left.mean_s


def test_the_state_is_of_the_end_the_verdict_or_the_lock(run: RunDir) -> None:
    facts = RunFacts()
    ended = Planted(steps=3).history()
    assert summarize(run, ended, facts).state == "done"
    open_end = Planted(steps=3, ends=False).history()
    assert summarize(run, open_end, facts).state == "killed"
    (run.path / "logs/attempt_1/verdict.json").write_text('{"outcome": "failed"}')
    assert summarize(run, open_end, facts).state == "failed"


def test_phases_are_shares_of_the_step_and_waits_are_named(run: RunDir) -> None:
    summary = summarize(run, Planted().history(), RunFacts())
    shares = {phase.name: phase.share for phase in summary.phases}
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.01)
    assert shares["rollout"] == pytest.approx(6 / 11.6, abs=0.03)
    assert summary.waits[0].who == "trainer"


def test_memory_is_what_the_watchdog_saw(run: RunDir) -> None:
    mib = 2**20
    names = {"6": "engine-0", "7": "engine-0-server", "8": "trainer-rank-0", "9": "driver"}
    sizes = {"6": 100 * mib, "7": 800 * mib, "8": 300 * mib, "9": 50 * mib}
    peaks = {**sizes, "7": 600 * mib, "8": 400 * mib}
    record = {"time": 1.0, "resident_bytes": sizes, "peak_bytes": peaks, "names": names}
    end = {**record, "time": 2.0, "resident_bytes": {"7": 100 * mib}, "peak_bytes": {"7": 1}}
    file = run.path / "logs/attempt_1/memory.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in (record, end)) + "\n{torn")
    phases = {"start": 500 * mib, "step": 450 * mib}
    planned = [{"name": "trainer-rank-0", "node": 0, "phases": phases}]
    told = memory_of(run, Planted(steps=1).history(), RunFacts(plan={"processes": planned}))
    seen = {
        one.worker: (one.used_bytes // mib, one.peak_bytes // mib, one.planned_bytes)
        for one in told
    }
    assert seen == {
        "engine-0": (100, 700, None),
        "trainer-rank-0": (300, 400, 500 * mib),
        "others": (50, 50, None),
    }, "what processes share is counted once, and an engine's own together"


def test_the_plan_says_what_the_fullest_device_will_hold() -> None:
    parts = [{"name": "weights", "size_bytes": 10}, {"name": "margin", "size_bytes": 5}]
    facts = RunFacts(plan={"forecast": {"training": parts, "rollout": []}})
    assert planned_bytes(facts) == 10 and planned_bytes(RunFacts()) is None


def test_mfu_is_known_of_a_device_that_is_known() -> None:
    costs = {"attention_per_position": 0, "window_per_position": 0, "window": 0, "recurrence": 0}
    flops = {"matmul": 2 * 8 * 10**9, **costs}
    TokenFlops(**flops)
    history = Planted(courses={"train_s": (line(5.0, 5.0), 0.0)}).history()
    plan = {"forecast": {"device": "H100"}, "trainer": {"dp": 8}}
    known = RunFacts(plan=plan, manifest={"token_flops": flops})
    # 30,000 tokens x 3 x 16 GFLOP in 5 s on eight devices of 989 TFLOP/s
    assert mfu_of(history, known) == pytest.approx(3e4 * 3 * 16e9 / (5 * 8 * 989e12))
    assert mfu_of(history, RunFacts(manifest={"token_flops": flops})) is None
    newer = RunFacts(plan=plan, manifest={"token_flops": {**flops, "another_versions": 1}})
    assert mfu_of(history, newer) is None
