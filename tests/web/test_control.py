"""What the page may start and stop: only with `--control`, only from the page itself, and by the
command that it shows."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from milescli.checkpoint.run_control import LONGEST_NOTE, read_note
from milescli.web import control
from milescli.web.control import Chat, Control
from tests.checkpoint.making import make_run
from tests.fake_run import SAMPLE, WrittenRun
from tests.waiting import until
from tests.web.serving import GATE, client_of, site_of

CONTROL = "/api/control"
MAY = replace(GATE, can_control=True)


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    """Of a server that was started with `--control`."""
    site = site_of(folder)
    site.control = Control()
    with client_of(site, MAY) as client:
        yield client
    site.control.close()


def finished(client: TestClient, job: dict[str, Any]) -> dict[str, Any]:
    """The command once it has ended."""

    def ended() -> dict[str, Any] | None:
        jobs = client.get(f"{CONTROL}/jobs").json()["jobs"]
        [one] = [one for one in jobs if one["id"] == job["id"]]
        return one if one["exit_code"] is not None else None

    until(lambda: ended() is not None, "the command ends")
    found = ended()
    assert found is not None
    return found


@pytest.mark.parametrize("path", ["launch", "runs/tiny-1/stop", "chats/1/say"])
def test_without_the_users_word_nothing_is_started(
    run: WrittenRun, folder: Path, path: str
) -> None:
    with client_of(site_of(folder)) as reader:
        response = reader.post(f"{CONTROL}/{path}", json={})
        assert response.status_code == 405 and "miles ui --control" in response.json()["fix"]
        assert reader.get(f"{CONTROL}/jobs").status_code == 405
        assert reader.get("/api/runs").json()["can_control"] is False


def test_another_page_cannot_start_anything(run: WrittenRun, client: TestClient) -> None:
    """It has no key, and where a browser has it as a cookie, the browser says who sends."""
    url = f"{CONTROL}/launch"
    form = client.post(url, data={"arguments": "quickstart"})
    plain = client.post(url, content='{"arguments": "quickstart"}')
    cross = client.post(url, json={}, headers={"sec-fetch-site": "cross-site"})
    keyless = client.post(url, json={}, headers={"authorization": ""})
    assert [one.status_code for one in (form, plain, cross, keyless)] == [403] * 4
    assert client.post("/api/runs", json={}).status_code == 405
    assert client.get(f"{CONTROL}/jobs").json() == {"jobs": []}


@pytest.mark.parametrize("body", [b"[]", b"{", b"[" * 100_000, b'{"arguments": 5}', b"x" * 200_000])
def test_what_cannot_be_read_is_refused(client: TestClient, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = client.post(f"{CONTROL}/launch", content=body, headers=headers)
    assert response.status_code == 400 and set(response.json()) == {"what", "why", "fix"}


def test_a_command_is_run_as_it_is_shown_and_its_output_too(client: TestClient) -> None:
    started = client.post(f"{CONTROL}/launch", json={"arguments": "nosuch --set 'a b=1'"}).json()
    assert started["command"] == "miles launch nosuch --set 'a b=1'"
    done = finished(client, started)
    assert done["exit_code"] not in (0, None) and "nosuch" in done["output"]


def test_a_server_that_closes_leaves_nothing_of_a_command_that_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    closed = Control()
    closed.launch({"arguments": "--help"})
    assert [*tmp_path.iterdir()]
    closed.close()
    assert not [*tmp_path.iterdir()]


def test_words_that_no_shell_could_read_are_refused(client: TestClient) -> None:
    for arguments in ("'quickstart", "a " * 300):
        response = client.post(f"{CONTROL}/launch", json={"arguments": arguments})
        assert response.status_code == 400, response.text


def test_a_run_that_does_not_run_is_not_stopped(run: WrittenRun, client: TestClient) -> None:
    started = client.post(f"{CONTROL}/runs/tiny-1/stop", json={}).json()
    assert "tiny-1" in started["command"]
    assert "not running" in finished(client, started)["output"]
    assert client.post(f"{CONTROL}/runs/tiny-2/stop", json={}).status_code == 404
    assert client.post(f"{CONTROL}/runs/tiny-1/rm", json={}).status_code == 404


def test_a_note_is_kept(run: WrittenRun, client: TestClient) -> None:
    url = f"{CONTROL}/runs/tiny-1/note"
    assert client.post(url, json={"note": "half the rate #keep"}).status_code == 200
    assert read_note(run.run) == "half the rate #keep"
    assert client.post(url, json={"note": "x" * (LONGEST_NOTE + 1)}).status_code == 400
    assert client.post(url, json={"note": ""}).status_code == 200
    assert read_note(run.run) == "" and not run.run.note_file.exists()


def test_a_chat_that_cannot_start_says_why_and_is_ended(
    run: WrittenRun, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{CONTROL}/runs/tiny-1/chat"
    assert client.post(url, json={"step": "x"}).status_code == 400
    chat = client.post(url, json={"step": "7"}).json()
    assert chat["subject"] == "tiny-1@7" and not chat["is_ready"]

    def now() -> dict[str, Any]:
        told: dict[str, Any] = client.get(f"{CONTROL}/chats/{chat['id']}").json()
        return told

    until(lambda: now()["is_over"] and now()["error"], "the chat says why it cannot start")
    assert now()["error"]["why"]
    said = client.post(f"{CONTROL}/chats/{chat['id']}/say", json={"text": "hello"})
    assert said.status_code == 404
    monkeypatch.setattr(control, "MAX_CHATS", 0)
    assert client.post(url, json={}).status_code == 503
    assert client.post(f"{CONTROL}/chats/{chat['id']}/end", json={}).status_code == 200
    assert client.get(f"{CONTROL}/chats/{chat['id']}").status_code == 404


def test_a_reward_is_tried_and_its_figures_come_back(
    folder: Path, tmp_path: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = make_run(folder / "kept", model_dir=tmp_path)
    kept.rollouts_dir.mkdir()
    lines = [
        json.dumps({**SAMPLE, "label": "5", "response": text, "reward": 0.0})
        for text in ("5", "6", r"\boxed{5}")
    ]
    (kept.rollouts_dir / "step_1.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(control, "MAX_FLIPS", 1)
    url = f"{CONTROL}/runs/kept/rewards"
    for body in ({}, {"reward": "  "}, {"reward": "math", "last": "-1"}):
        assert client.post(url, json=body).status_code == 400

    def tried(reward: str) -> dict[str, Any]:
        started = client.post(url, json={"reward": reward, "last": "5"}).json()
        assert f"--reward={reward}" in started["command"]
        assert finished(client, started)["exit_code"] is not None
        job: dict[str, Any] = client.get(f"{CONTROL}/jobs/{started['id']}").json()
        return job

    job = tried("--help")
    assert job["exit_code"] != 0 and "`--help`" in job["result"]["error"], "it is no option"
    result = tried("math")["result"]
    assert result["kind"] == "rewards" and result["names"] == ["as recorded", "math"]
    assert len(result["flips"]) == 1 and result["num_flips"] == 2
    assert client.get(f"{CONTROL}/jobs/99").status_code == 404


def test_a_message_without_a_reply_has_the_reason_in_its_place() -> None:
    said = json.dumps({"kind": "refusal", "text": "no room"})
    process = subprocess.Popen(
        [sys.executable, "-c", f"print({said!r})"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    chat = Chat(id=1, subject="tiny-1", process=process)
    chat.listen()
    until(lambda: chat.messages, "the chat says why there is no reply")
    assert chat.messages == [{"who": "miles", "text": "no room", "tokens": []}]
    process.wait()
