"""What Prometheus scrapes of several runs at once, read by its own parser."""

from __future__ import annotations

import json
import os
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from milescli.core.events import Notice
from tests.fake_run import WrittenRun, row_step_done


def scraped(client: TestClient) -> dict[str, dict[tuple[str, ...], float]]:
    """Name -> labels' values, sorted by label -> figure."""
    response = client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    families = list(text_string_to_metric_families(response.text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_all_runs_stand_under_their_names(
    run: WrittenRun, folder: Path, client: TestClient
) -> None:
    run.steps(1, 3, reward=0.75)
    WrittenRun(path=folder / "rows-1").tell(row_step_done(7))
    told = scraped(client)
    assert told["miles_step"] == {("tiny-1",): 3.0, ("rows-1",): 7.0}
    assert told["miles_reward_mean"] == {("tiny-1",): 0.75}


def test_no_name_of_a_run_tears_the_others_apart(
    run: WrittenRun, folder: Path, client: TestClient
) -> None:
    run.steps(1, 3)
    WrittenRun(path=folder / "# HELP miles_step").steps(1, 7)
    assert scraped(client)["miles_step"] == {("tiny-1",): 3.0, ("# HELP miles_step",): 7.0}


def test_a_scrape_goes_on_where_the_last_ended(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 2)
    for _ in range(2):
        assert scraped(client)["miles_rollout_tokens_total"] == {("tiny-1",): 18_800.0}
    run.steps(3, 3)
    run.tell(Notice(text="look", level="warning"))
    attempt = run.attempt()
    line = {"time": 1.0, "resident_bytes": {"1": 5, "2": 6}, "names": {"1": "rank", "2": "rank"}}
    (attempt / "memory.jsonl").write_text(json.dumps(line) + "\n")
    told = scraped(client)
    assert told["miles_rollout_tokens_total"] == {("tiny-1",): 28_200.0}
    assert told["miles_warnings_total"] == {("tiny-1",): 1.0}
    assert told["miles_process_resident_bytes"] == {("rank", "tiny-1"): 11.0}
    run.run.events_file.unlink()
    run.steps(1, 1)
    assert scraped(client)["miles_rollout_tokens_total"] == {("tiny-1",): 9_400.0}


def test_a_run_that_ended_long_ago_is_left_out(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 2)
    os.utime(run.run.events_file, (1.0, 1.0))
    assert "miles_step" not in scraped(client)
