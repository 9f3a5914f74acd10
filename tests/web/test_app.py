"""The routes as a whole: what is sent, and how."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from milescli.checkpoint.run_control import write_note
from milescli.checkpoint.run_lock import lock
from milescli.web import app, live
from milescli.web.app import READS, Threads
from milescli.web.files import STATIC
from milescli.web.responses import Busy
from tests.fake_run import WrittenRun, step_done
from tests.web.serving import KEY, client_of, site_of

MISSING = {"samples"}
"""Of a run that has none, not found."""


@pytest.mark.parametrize("name", sorted({*READS} - MISSING))
def test_every_endpoint_answers_of_a_run_in_which_nothing_has_happened(
    run: WrittenRun, client: TestClient, name: str
) -> None:
    response = client.get(f"/api/runs/tiny-1/{name}")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    assert isinstance(response.json(), dict)


@pytest.mark.parametrize("name", [*sorted(READS), "live", "logs/a/b", "find-samples"])
def test_a_run_that_is_not_shown_is_not_found(
    run: WrittenRun, client: TestClient, name: str
) -> None:
    for wrong in ("tiny-2", "..", "%2e%2e", "tiny-1%2f..", "tiny-1:none"):
        response = client.get(f"/api/runs/{wrong}/{name}")
        assert response.status_code == 404, response.text
        assert set(response.json()) == {"what", "why", "fix"}


def test_runs_are_listed_and_new_ones_show_up_by_themselves(
    run: WrittenRun, folder: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("milescli.web.shown.LOOK_EVERY_S", 0.0)
    run.steps(1, 3, reward=0.75)
    [told] = client.get("/api/runs").json()["runs"]
    assert told == {
        "id": "tiny-1",
        "name": "tiny-1",
        "state": "not started",
        "step": 3,
        "num_steps": 40,
        "reward": 0.75,
        "accuracy": None,
        "changed_s": pytest.approx(run.run.events_file.stat().st_mtime),
        "created_s": None,
        "model": "",
        "note": "",
        "forked_from": "",
        "adapters": [],
    }
    write_note(run.run, "twice the batch #sweep")
    [told] = client.get("/api/runs").json()["runs"]
    assert told["note"] == "twice the batch #sweep"
    WrittenRun(path=folder / "tiny-2")
    (folder / "no-run").mkdir()
    listed = client.get("/api/runs").json()["runs"]
    assert {one["id"] for one in listed} == {"tiny-1", "tiny-2"}


def test_an_adapter_runs_as_long_as_its_run(run: WrittenRun, client: TestClient) -> None:
    run.attempt(engine_0="")
    WrittenRun(path=run.run.adapters_dir / "sums").steps(1, 20)
    with lock(run.run):
        told = client.get("/api/runs/tiny-1:sums/summary").json()
    assert told["state"] == "running" and told["left"]["mean_s"] == pytest.approx(62.0)


def test_what_the_browser_has_is_not_sent_again(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 5)
    path = "/api/runs/tiny-1/columns?name=train/loss"
    first = client.get(path)
    kept = {"if-none-match": first.headers["etag"]}
    assert client.get(path, headers=kept).status_code == 304
    assert client.get(path, headers=kept).content == b""
    run.steps(6, 6)
    assert client.get(path, headers=kept).status_code == 200


def test_what_is_long_is_packed_for_who_knows_gzip(run: WrittenRun, client: TestClient) -> None:
    run.steps(1, 300)
    path = "/api/runs/tiny-1/columns?name=train/loss"
    with client.stream("GET", path, headers={"accept-encoding": "gzip"}) as packed:
        assert packed.headers["content-encoding"] == "gzip"
        data = b"".join(packed.iter_raw())
    plain = client.get(path, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert gzip.decompress(data) == plain.content and len(data) < len(plain.content)


def test_json_is_strict(run: WrittenRun, client: TestClient) -> None:
    run.tell(step_done(1, loss=float("nan"), reward=float("inf")))
    for name in ("summary", "columns?name=train/loss&name=rollout/reward_mean", "notices"):
        text = client.get(f"/api/runs/tiny-1/{name}").text
        json.loads(text, parse_constant=pytest.fail)


def test_the_page_and_its_charts_are_there(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert page.content == (STATIC / "index.html").read_bytes()
    for name, kind in (("uPlot.iife.min.js", "text/javascript"), ("uPlot.min.css", "text/css")):
        chart = client.get(f"/static/vendored/uplot/{name}")
        assert chart.status_code == 200 and chart.headers["content-type"].startswith(kind)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/gate.py",
        "/static/vendored/..%2f..%2fpyproject.toml",
        "/static/vendored/uplot/LICENSE",
        "/static/%2fetc%2fpasswd",
        "/static/",
        "/static/none.js",
        "/favicon.ico",
        "/api",
        "/api/other",
    ],
)
def test_nothing_else_of_the_disk_has_a_url(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code in (403, 404)
    assert "import" not in response.text and "root:" not in response.text


@pytest.mark.parametrize("path", ["/api/runs", "/api/runs/tiny-1/live"])
def test_a_fault_of_ours_is_told_and_shows_no_key(
    folder: Path, run: WrittenRun, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Of a stream too, which has begun by then."""
    told = list[str]()
    site = site_of(folder)
    site.on_fault = told.append

    def broken(*_: object, **__: object) -> object:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(app, "list_runs", broken)
    monkeypatch.setattr(live, "state_of", broken)
    with client_of(site) as client:
        client._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
        response = client.get(f"{path}?key={KEY}")
    assert told == [f"{path}: ZeroDivisionError: by nothing"]
    if not path.endswith("live"):
        assert response.status_code == 500 and "ZeroDivisionError" in response.json()["why"]


def test_no_more_run_than_may() -> None:
    running, most, lock, full = 0, 0, threading.Lock(), threading.Barrier(3)

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(60.0)
        threading.Event().wait(0.02)  # time for one too many
        with lock:
            running -= 1

    async def all_of_them() -> None:
        threads = Threads(3, what="test")
        await asyncio.gather(*(threads.run(call) for _ in range(12)))

    asyncio.run(all_of_them())
    assert most == 3


def test_one_that_hangs_is_left_behind_and_counts_until_it_ends() -> None:
    ends = threading.Event()

    async def asked() -> None:
        threads = Threads(1, what="read", wait_s=0.05)
        with pytest.raises(Busy, match="did not reply"):
            await threads.run(lambda: ends.wait(60.0), call_s=0.05)
        with pytest.raises(Busy, match="its turn to read"):
            await threads.run(lambda: None)
        ends.set()
        patient = Threads(1, what="read")
        assert await patient.run(lambda: 7) == 7

    asyncio.run(asked())


def test_what_a_call_raises_is_raised() -> None:
    async def asked() -> None:
        with pytest.raises(ZeroDivisionError):
            await Threads(1, what="read").run(lambda: 1 // 0)

    asyncio.run(asked())
