"""Memory: expected, measured, and over time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from milescli.checkpoint.run_dir import verdict_file
from milescli.checkpoint.run_lock import lock
from milescli.core.events import (
    CheckpointSaved,
    Notice,
    PhaseStarted,
    WarmupStepDone,
    WorkerLost,
    WorkerReplaced,
)
from milescli.plan.types import Forecast, Part
from milescli.platform.memory_record import MemoryRecord
from milescli.recipe.keys import keys
from milescli.recipe.load import load, value_at
from milescli.recipe.resolved import resolved_yaml
from milescli.web import endpoints
from tests.commands.test_verbs import PLAN
from tests.fake_run import WrittenRun, eval_done, report

FORECAST = Forecast(
    device="H100",
    memory_bytes=80,
    training=[Part(name="weights", size_bytes=60, basis="counted")],
    rollout=[Part(name="KV cache", size_bytes=70, basis="formula")],
    publishing_bytes=0,
    host_bytes=0,
    host_memory_bytes=0,
    cache_tokens=0,
    rollout_s=1.0,
    train_s=1.0,
    sync_s=0.0,
    step_s=2.0,
    train_parts_s={},
    tokens_per_s=1.0,
    gpu_hours=1.0,
)


def test_a_forecast_stands_by_its_parts(run: WrittenRun, client: TestClient) -> None:
    run.run.plan_file.write_text(replace(PLAN, forecast=FORECAST).to_json())
    told = client.get("/api/runs/tiny-1/memory").json()
    assert (told["device"], told["memory_bytes"]) == ("H100", 80)
    assert told["planned"][0] == {
        "phase": "training",
        "parts": [{"name": "weights", "size_bytes": 60, "basis": "counted"}],
    }
    assert [one["phase"] for one in told["planned"]] == ["training", "rollout"]


def test_a_plan_of_a_cpu_expects_nothing(run: WrittenRun, client: TestClient) -> None:
    run.run.plan_file.write_text(PLAN.to_json())
    told = client.get("/api/runs/tiny-1/memory").json()
    assert told["planned"] == [] and told["device"] is None


def test_main_memory_over_time_is_what_the_watchdog_wrote(
    run: WrittenRun, client: TestClient
) -> None:
    import os

    record = MemoryRecord(driver=os.getpid(), folder=run.attempt())
    record.sample([])
    record.end()
    [first, second] = client.get("/api/runs/tiny-1/memory").json()["over_time"]
    assert first["resident_bytes"]["driver"] > 2**20 and second["time_s"] >= first["time_s"]


def test_processes_of_one_name_count_together(run: WrittenRun, client: TestClient) -> None:
    lines = [
        {
            "time": 10.0,
            "resident_bytes": {"1": 5, "2": 7, "3": 1},
            "names": {"1": "rank", "2": "rank"},
        },
        {"time": 20.0, "oom_kills": 1},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.attempt() / "memory.jsonl").write_text(text + '{"torn')
    told = client.get("/api/runs/tiny-1/memory").json()["over_time"]
    assert told == [{"time_s": 10.0, "resident_bytes": {"rank": 12, "3": 1}}]


def test_a_long_record_is_thinned(
    run: WrittenRun, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "MAX_POINTS", 10)
    lines = [json.dumps({"time": time, "resident_bytes": {"1": 1}}) for time in range(25)]
    (run.attempt() / "memory.jsonl").write_text("\n".join(lines) + "\n")
    told = client.get("/api/runs/tiny-1/memory").json()["over_time"]
    assert [one["time_s"] for one in told] == [0, 4, 8, 12, 16, 20, 24]


def test_phases_of_the_last_steps(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 100)
    told = client.get("/api/runs/tiny-1/timeline").json()
    steps = {one["step"] for one in told["intervals"]}
    assert steps == set(range(51, 101))
    first = [one for one in told["intervals"] if one["step"] == 51]
    assert [one["what"] for one in first] == ["rollout", "pack", "train", "publish"]
    assert first[0]["end_s"] - first[0]["begin_s"] == pytest.approx(0.66 * 3.1)
    assert told["begin_s"] == first[0]["begin_s"] < told["end_s"]


def test_what_happened_beside_the_steps_that_are_shown(run: WrittenRun, client: TestClient) -> None:
    run.tell(eval_done(0, 0.1))
    run.steps(1, 10)
    run.tell(eval_done(10, 0.5), every_s=0.5)
    run.tell(WorkerLost(worker="engine 1", what="died", why="", step=10, restart=1), every_s=0.1)
    run.tell(WorkerReplaced(worker="engine 1", step=10, seconds=3.0), every_s=3.0)
    run.tell(CheckpointSaved(step=10, path="x", size_bytes=5, seconds=1.0), every_s=2.0)
    run.steps(11, 12, reward=0.5)
    told = client.get("/api/runs/tiny-1/timeline?first=9&last=12").json()
    assert {one["actor"] for one in told["intervals"]} >= {"evaluation", "engine 1", "checkpoint"}
    early = client.get("/api/runs/tiny-1/timeline?first=3&last=4").json()
    assert {one["step"] for one in early["intervals"]} == {3, 4}


def test_profiles_that_were_taken_and_their_sizes(run: WrittenRun, client: TestClient) -> None:
    folder = run.run.profiles_dir / "1"
    folder.mkdir(parents=True)
    (folder / "rank_0.json.gz").write_bytes(bytes(300))
    (folder / "out").symlink_to(run.path)
    run.tell(Notice(text=f"profile 1 is in {folder}"), Notice(text="profile 2 is in elsewhere"))
    first, second = client.get("/api/runs/tiny-1/timeline").json()["profiles"]
    assert first["number"] == 1 and first["time_s"] == second["time_s"] - 8.0
    assert first["files"] == [{"name": "rank_0.json.gz", "size_bytes": 300}]
    assert second["files"] == []


def test_there_is_a_bound(
    run: WrittenRun, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "MAX_INTERVALS", 8)
    run.steps(1, 10)
    told = client.get("/api/runs/tiny-1/timeline").json()
    assert [one["step"] for one in told["intervals"]] == [9] * 4 + [10] * 4


@pytest.mark.parametrize(
    ("query", "texts"),
    [
        ("", ["start: now", "careful", "Later"]),
        ("level=warning", ["careful"]),
        ("kind=Notice", ["careful", "Later"]),
        ("q=LATER", ["Later"]),
        ("q=phasestarted", ["start: now"]),
        ("offset=1&limit=1", ["careful"]),
        ("limit=0", []),
    ],
)
def test_what_was_told_can_be_searched(
    run: WrittenRun, client: TestClient, query: str, texts: list[str]
) -> None:
    run.tell(
        PhaseStarted(phase="start", detail="now"),
        Notice(text="careful", level="warning"),
        Notice(text="Later"),
    )
    told = client.get(f"/api/runs/tiny-1/notices?{query}").json()
    assert [one["text"] for one in told["notices"]] == texts
    assert told["total"] >= len(texts)


def test_a_recipe_has_every_key_with_its_origin(
    run: WrittenRun, client: TestClient, tmp_path: Path
) -> None:
    loaded = load("quickstart", sets=["train.steps=7"], environ={}, cwd=tmp_path, home=tmp_path)
    run.run.recipe_file.write_text(resolved_yaml(loaded))
    told = {one["key"]: one for one in client.get("/api/runs/tiny-1/recipe").json()["keys"]}
    assert told["train.steps"] == {
        "key": "train.steps",
        "value": 7,
        "origin": "--set train.steps=7",
    }
    assert told["rollout.stop"]["origin"] == "default"
    shown = [name for name in keys() if value_at(loaded.recipe, name) is not None]
    assert set(shown) <= set(told)


def test_a_recipe_that_is_no_yaml_is_read_from_the_manifest(
    run: WrittenRun, client: TestClient
) -> None:
    run.run.recipe_file.write_text("a: [\n")
    run.run.manifest_file.write_text(json.dumps({"recipe": {"train.steps": 9}, "seed": 1}))
    told = client.get("/api/runs/tiny-1/recipe").json()
    assert told == {"keys": [{"key": "train.steps", "value": 9, "origin": ""}]}
    assert client.get("/api/runs/tiny-1/manifest").json() == {"seed": 1}


def test_a_plan_has_its_reasons(run: WrittenRun, client: TestClient) -> None:
    run.run.plan_file.write_text(PLAN.to_json())
    told = client.get("/api/runs/tiny-1/plan").json()
    assert told["decisions"] == [
        {"key": "trainer.tp", "value": "2", "reason": "pinned by parallel.tp"}
    ]
    assert told["trainer"]["tp"] == 2 and len(told["slots"]) == 2 and told["alternatives"] == []


def test_an_adapter_without_a_plan_shows_that_of_its_run(
    run: WrittenRun, client: TestClient
) -> None:
    run.run.plan_file.write_text(PLAN.to_json())
    WrittenRun(path=run.run.adapters_dir / "sums")
    assert client.get("/api/runs/tiny-1:sums/plan").json()["trainer"]["tp"] == 2


def test_a_run_before_its_first_step_says_how_far_its_warmup_is(
    run: WrittenRun, client: TestClient
) -> None:
    run.tell(PhaseStarted(phase="start", detail="Ray"))
    run.tell(PhaseStarted(phase="warmup", detail="60 supervised steps"))
    assert client.get("/api/runs/tiny-1/beginning").json()["warmup"] is None
    for step in (1, 2, 3):
        run.tell(
            WarmupStepDone(step=step, num_steps=60, report=report(loss=3.0 - step), step_s=0.5)
        )
    told = client.get("/api/runs/tiny-1/beginning").json()
    assert told["phases"] == [{"name": "start", "seconds": 8.0}]
    warm = told["warmup"]
    assert (warm["step"], warm["num_steps"], warm["first"], warm["last"]) == (3, 60, 2.0, 0.0)
    assert warm["left_s"] == pytest.approx(28.5) and len(warm["losses"]) == 3


def test_only_a_run_that_did_not_end_well_says_why(run: WrittenRun, client: TestClient) -> None:
    folder = run.attempt(trainer_rank_0="loss is 3\nTraceback: it is broken\n")
    with lock(run.run):
        assert client.get("/api/runs/tiny-1/why").json() == {"state": "running"}
    error = {"error": "trainer rank 0 died", "why": "signal 9", "fix": ["miles resume tiny-1"]}
    verdict_file(folder).write_text(json.dumps({"outcome": "failed", "step": 3, "error": error}))
    told = client.get("/api/runs/tiny-1/why").json()
    assert told["state"] == "failed" and told["cause"]["why"] == "signal 9"
    assert told["summary"] == "tiny-1 failed at step 3: trainer rank 0 died"
    assert told["log"] == {"attempt": "attempt_1", "file": "trainer-rank-0.log"}
    assert "it is broken" in told["last_lines"] and told["next"] == ["miles resume tiny-1"]
    log = folder / "trainer-rank-0.log"
    log.unlink()
    log.symlink_to("/etc/passwd")
    told = client.get("/api/runs/tiny-1/why").json()
    assert told["log"] is None and told["last_lines"] == ""
    verdict_file(folder).write_text(json.dumps({"outcome": "done", "step": 3}))
    assert client.get("/api/runs/tiny-1/why").json() == {"state": "done"}
