"""Memory: expected, measured, and over time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from milescli.plan.types import Forecast, Part
from milescli.platform.memory_record import MemoryRecord
from milescli.web import memory
from tests.commands.test_verbs import PLAN
from tests.web.written import WrittenRun

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
    record.look([])
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
    monkeypatch.setattr(memory, "MAX_POINTS", 10)
    lines = [json.dumps({"time": time, "resident_bytes": {"1": 1}}) for time in range(25)]
    (run.attempt() / "memory.jsonl").write_text("\n".join(lines) + "\n")
    told = client.get("/api/runs/tiny-1/memory").json()["over_time"]
    assert [one["time_s"] for one in told] == [0, 4, 8, 12, 16, 20, 24]
