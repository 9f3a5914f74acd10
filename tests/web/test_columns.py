"""Figures as a chart draws them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from milescli.core.events import AdapterEvent, to_record
from milescli.web.columns import thin_steps
from tests.fake_run import WrittenRun, row_step_done, step_done

FIGURES = st.lists(
    st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=400
)


def columns(client: TestClient, query: str, run: str = "tiny-1") -> dict:
    response = client.get(f"/api/runs/{run}/columns?{query}")
    assert response.status_code == 200, response.text
    return response.json()


def test_columns_have_a_figure_or_null_for_every_step(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 3, reward_parts={"exact": 0.5})
    told = columns(client, "name=rollout/reward_mean&name=reward/exact&name=not/there")
    assert told["steps"] == [1, 2, 3] and (told["first"], told["last"]) == (1, 3)
    assert told["columns"]["rollout/reward_mean"] == [0.5] * 3
    assert told["columns"]["reward/exact"] == [0.5] * 3
    assert told["columns"]["not/there"] == [None] * 3
    assert told["times"][1] - told["times"][0] == pytest.approx(8.0)


def test_names_are_those_of_the_metrics(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 1, figures={"turns": 1.0})
    listed = client.get("/api/runs/tiny-1/names").json()["columns"]
    by_name = {one["name"]: one for one in listed}
    assert {"train/loss", "train/entropy", "agent/turns", "time/step_s"} <= set(by_name)
    assert by_name["time/step_s"]["section"] == "time" and by_name["time/step_s"]["unit"] == "s"
    assert by_name["train/entropy"]["about"]


def test_a_range_of_steps(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 20)
    assert columns(client, "name=train/loss&first=5&last=8")["steps"] == [5, 6, 7, 8]
    assert columns(client, "name=train/loss&first=50")["steps"] == []
    assert columns(client, "name=train/loss&first=9&last=3")["steps"] == []


def test_a_loss_that_is_no_number_is_null(run: WrittenRun, client: TestClient) -> None:
    run.tell(step_done(1), step_done(2, loss=math.nan), step_done(3, loss=math.inf))
    assert columns(client, "name=train/loss")["columns"]["train/loss"] == [0.01, None, None]


def test_a_line_that_is_torn_is_read_when_it_is_whole(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 3)
    whole = run.run.events_file.read_bytes()
    run.run.events_file.write_bytes(whole[:-40])
    assert columns(client, "name=train/loss")["steps"] == [1, 2]
    with run.run.events_file.open("ab") as file:
        file.write(whole[-40:])
    assert columns(client, "name=train/loss")["steps"] == [1, 2, 3]


def test_a_run_that_does_steps_again_has_them_once(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 5, reward=0.2)
    run.steps(3, 4, reward=0.9)
    told = columns(client, "name=rollout/reward_mean")
    assert told["steps"] == [1, 2, 3, 4]
    assert told["columns"]["rollout/reward_mean"] == [0.2, 0.2, 0.9, 0.9]


def test_events_of_an_older_miles_are_read(run: WrittenRun, client: TestClient) -> None:
    """Without the fields that later versions added."""
    record = to_record(step_done(1))
    for name in ("publish", "flow"):
        del record[name]
    for name in ("figures", "accept_length", "accept_rate", "skipped_prompts"):
        del record["rollout"][name]
    run.run.events_file.write_text(json.dumps(record) + "\n" + '{"event": "OfTomorrow"}\n')
    told = columns(client, "name=train/loss&name=flow/idle_s")
    assert told["columns"] == {"train/loss": [0.01], "flow/idle_s": [None]}
    assert told["times"] == [None]


def test_a_run_over_rows(run: WrittenRun, client: TestClient) -> None:
    run.tell(row_step_done(1), row_step_done(2, loss=1.5))
    told = columns(client, "name=train/loss&name=train/epoch")
    assert told["columns"] == {"train/loss": [2.0, 1.5], "train/epoch": [0.1, 0.2]}
    assert client.get("/api/runs/tiny-1/summary").json()["learns_from_rows"] is True


def test_adapters_have_columns_of_their_own(run: WrittenRun, client: TestClient) -> None:
    for name, reward in (("sums", 0.25), ("words", 0.75)):
        WrittenRun(path=run.run.adapters_dir / name)
        run.tell(AdapterEvent(adapter=name, event=step_done(1, reward=reward)))
    listed = client.get("/api/runs").json()["runs"]
    assert [one["adapters"] for one in listed] == [["tiny-1:sums", "tiny-1:words"]]
    for adapter, reward in (("tiny-1:sums", 0.25), ("tiny-1%3Awords", 0.75)):
        told = columns(client, "name=rollout/reward_mean", run=adapter)
        assert told["columns"]["rollout/reward_mean"] == [reward]
    own = WrittenRun(path=run.run.adapters_dir / "sums")
    own.steps(1, 2, reward=0.5)
    assert columns(client, "name=train/loss", run="tiny-1:sums")["steps"] == [1, 2]


@pytest.mark.parametrize(
    "query", ["points=1", "points=x", "first=-1", "points=999999", "last=1e3", "first=" + "9" * 400]
)
def test_a_question_that_makes_no_sense_is_refused(
    run: WrittenRun, client: TestClient, query: str
) -> None:
    response = client.get(f"/api/runs/tiny-1/columns?name=train/loss&{query}")
    assert response.status_code == 400 and set(response.json()) == {"what", "why", "fix"}


def test_too_many_names_are_refused(run: WrittenRun, client: TestClient) -> None:
    query = "&".join(f"name=train/{number}" for number in range(65))
    assert client.get(f"/api/runs/tiny-1/columns?{query}").status_code == 400


def test_a_long_run_is_thinned_to_its_extremes(run: WrittenRun, client: TestClient) -> None:
    rewards = {170: 0.99, 330: 0.01}
    run.tell(*(step_done(step, reward=rewards.get(step, 0.5)) for step in range(1, 501)))
    told = columns(client, "name=rollout/reward_mean&points=50")
    values = dict(zip(told["steps"], told["columns"]["rollout/reward_mean"], strict=True))
    assert len(values) <= 50 and told["num_steps"] == 500
    assert (values[170], values[330]) == (0.99, 0.01)
    assert (told["first"], told["last"]) == (1, 500)


@settings(max_examples=40)
@given(FIGURES, FIGURES, st.integers(min_value=2, max_value=120))
def test_thinning_keeps_smallest_and_largest(
    one: list[float], two: list[float], points: int
) -> None:
    length = min(len(one), len(two))
    kept = thin_steps([one[:length], two[:length]], length=length, points=points)
    assert kept == sorted(set(kept)) and kept[0] == 0 and kept[-1] == length - 1
    assert len(kept) <= max(points, 6)  # the ends, and one stretch of two columns
    for column in (one[:length], two[:length]):
        finite = [value for value in column if math.isfinite(value)]
        shown = [column[at] for at in kept if math.isfinite(column[at])]
        if finite:
            assert (min(shown), max(shown)) == (min(finite), max(finite))


@settings(max_examples=40)
@given(st.lists(st.floats(-1, 1), min_size=50, max_size=400))
def test_thinning_keeps_them_of_every_stretch(column: list[float]) -> None:
    length, points = len(column), 22
    kept = thin_steps([column], length=length, points=points)
    stretches = 10
    for number in range(stretches):
        stretch = range(number * length // stretches, (number + 1) * length // stretches)
        values, shown = [column[at] for at in stretch], [column[at] for at in kept if at in stretch]
        assert (min(shown), max(shown)) == (min(values), max(values))


def test_a_file_that_began_anew_is_read_anew(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 9)
    assert columns(client, "name=train/loss")["last"] == 9
    run.run.events_file.unlink()
    run.tell(replace(step_done(1), num_steps=2))
    assert columns(client, "name=train/loss")["steps"] == [1]
