"""Where time went, and what was told."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from milescli.core.events import CheckpointSaved, Notice, PhaseStarted, WorkerLost, WorkerReplaced
from milescli.web import timeline
from tests.console.fake_run import eval_done
from tests.web.written import WrittenRun


def test_phases_of_the_last_steps(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 100)
    told = client.get("/api/runs/tiny-1/timeline").json()
    steps = {one["step"] for one in told["intervals"]}
    assert steps == set(range(51, 101))
    first = [one for one in told["intervals"] if one["step"] == 51]
    assert [one["what"] for one in first] == ["rollout", "pack", "train", "publish"]
    assert first[0]["end_s"] - first[0]["begin_s"] == pytest.approx(4.0)
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
    monkeypatch.setattr(timeline, "MAX_INTERVALS", 8)
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
    told = client.get(f"/api/runs/tiny-1/told?{query}").json()
    assert [one["text"] for one in told["told"]] == texts
    assert told["total"] >= len(texts)
