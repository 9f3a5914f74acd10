"""Kept samples: text of a model, which may be anything."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
from starlette.testclient import TestClient

from milescli.web import samples
from tests.fake_run import SAMPLE, WrittenRun

HOSTILE = "</script><script>alert(1)</script>\u2028\x00\ud800'\"&<img src=x onerror=alert(1)>"


def test_samples_of_a_step_stand_by_their_prompts(run: WrittenRun, client: TestClient) -> None:
    run.keep(3, {"reward": 0.0}, {}, {"prompt_index": 9, "prompt": "other", "label": "12"})
    assert client.get("/api/runs/tiny-1/sample-steps").json() == {"steps": [3]}
    told = client.get("/api/runs/tiny-1/samples?step=3").json()
    assert told["step"] == 3
    first, second = told["groups"]
    assert [one["reward"] for one in first["samples"]] == [0.0, 1.0]
    assert (first["prompt_index"], first["prompt"]) == (0, SAMPLE["prompt"])
    assert (second["prompt_index"], second["label"]) == (9, "12")
    assert second["samples"][0]["response_ids"] == [1, 2]


def test_the_newest_step_is_shown_where_none_is_named(run: WrittenRun, client: TestClient) -> None:
    run.keep(2, {})
    run.keep(10, {"response": "new"})
    assert client.get("/api/runs/tiny-1/sample-steps").json() == {"steps": [2, 10]}
    assert client.get("/api/runs/tiny-1/samples").json()["step"] == 10


@pytest.mark.parametrize("query", ["", "?step=3"])
def test_a_step_without_samples_is_not_found(
    run: WrittenRun, client: TestClient, query: str
) -> None:
    response = client.get(f"/api/runs/tiny-1/samples{query}")
    assert response.status_code == 404 and set(response.json()) == {"what", "why", "fix"}


def test_text_of_a_model_is_json_and_nothing_else(run: WrittenRun, client: TestClient) -> None:
    run.keep(1, {"response": HOSTILE.replace("\ud800", "")})
    response = client.get("/api/runs/tiny-1/samples?step=1")
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    [group] = response.json()["groups"]
    assert group["samples"][0]["response"] == HOSTILE.replace("\ud800", "")


def test_lines_that_cannot_be_read_are_left_out(run: WrittenRun, client: TestClient) -> None:
    run.keep(1, {}, {"response": HOSTILE}, {"episode": {"turns": math.nan}})
    file = run.run.rollouts_dir / "step_1.jsonl"
    file.write_text(file.read_text() + '{"torn": \n[]\n{"prompt": 1}\n')
    [group] = client.get("/api/runs/tiny-1/samples?step=1").json()["groups"]
    assert group["samples"][0]["response"] == SAMPLE["response"]


def test_a_file_that_is_too_large_is_refused(
    run: WrittenRun, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "MAX_BYTES", 10)
    run.keep(1, {})
    assert client.get("/api/runs/tiny-1/samples?step=1").status_code == 400


def test_a_link_out_of_the_run_is_not_followed(run: WrittenRun, client: TestClient) -> None:
    secret = run.path.parent / "secret.jsonl"
    secret.write_text(json.dumps({**SAMPLE, "response": "secret"}))
    run.run.rollouts_dir.mkdir()
    (run.run.rollouts_dir / "step_1.jsonl").symlink_to(secret)
    response = client.get("/api/runs/tiny-1/samples?step=1")
    assert response.status_code == 403 and "#" not in response.json()["what"]
    found = client.get("/api/runs/tiny-1/find-samples?q=secret").json()
    assert found["found"] == []
    run.run.rollouts_dir.rename(elsewhere := run.path.parent / "elsewhere")
    run.run.rollouts_dir.symlink_to(elsewhere)
    (elsewhere / "step_2.jsonl").write_text(secret.read_text())
    found = client.get("/api/runs/tiny-1/find-samples?q=secret").json()
    assert found["found"] == []
    assert client.get("/api/runs/tiny-1/samples?step=2").status_code == 403


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("needle", [(5, 1)]),
        ("NEEDLE", [(5, 1)]),
        ('say "hi"', [(4, 0)]),
        ("größer", [(3, 0)]),
        ("GRÖSSER", []),
        ("GRÖßER", [(3, 0)]),
        ("two\nlines", [(2, 0)]),
        ("what is", [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]),
        ("stop_reason", []),
        ("", []),
    ],
)
def test_a_text_is_found_in_any_step(
    run: WrittenRun, client: TestClient, text: str, steps: list[tuple[int, int]]
) -> None:
    for step, response in enumerate(["a", "two\nlines", "Größer", 'Say "hi" \\', "z"], 1):
        run.keep(step, {"response": response}, *([{"response": "a Needle"}] if step == 5 else []))
    told = client.get("/api/runs/tiny-1/find-samples", params={"q": text}).json()
    assert sorted((one["step"], one["sample"]) for one in told["found"]) == steps
    assert told["is_all"] and told["searched_steps"] == (5 if text else 0)
    newest_first = [one["step"] for one in told["found"]]
    assert newest_first == sorted(newest_first, reverse=True)


def test_what_is_found_is_shown_with_what_stands_around_it(
    run: WrittenRun, client: TestClient
) -> None:
    run.keep(1, {"response": "a" * 500 + "needle" + "b" * 500})
    [one] = client.get("/api/runs/tiny-1/find-samples?q=needle").json()["found"]
    assert (one["where"], one["reward"]) == ("response", 1.0)
    assert one["excerpt"] == f"…{'a' * 80}needle{'b' * 80}…"


def test_a_prompt_is_found_once_and_its_responses_each(run: WrittenRun, client: TestClient) -> None:
    run.keep(1, *[{"prompt": "Add 2 and 3.", "response": text} for text in ("5", "2 + 3", "4")])
    told = client.get("/api/runs/tiny-1/find-samples?q=2").json()["found"]
    assert [(one["sample"], one["where"]) for one in told] == [(0, "prompt"), (1, "response")]


def test_a_search_ends_at_its_limit_and_for_time(
    run: WrittenRun, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 6):
        run.keep(step, {}, {})  # "#### 5", twice
    told = client.get("/api/runs/tiny-1/find-samples?q=5&limit=3").json()
    assert [one["step"] for one in told["found"]] == [5, 5, 4]
    assert (told["searched_steps"], told["is_all"]) == (2, False)
    monkeypatch.setattr(samples, "SEARCH_S", -1.0)
    told = client.get("/api/runs/tiny-1/find-samples?q=5").json()
    assert told == {"found": [], "searched_steps": 0, "is_all": False}


PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(40))
NAME = hashlib.sha256(PNG).hexdigest()


def test_a_picture_is_served_by_its_hash(run: WrittenRun, client: TestClient) -> None:
    names = [NAME, "../recipe.yaml", 7, EVIL_NAME]
    run.keep(1, {"images": names, "returned_images": names})
    [group] = client.get("/api/runs/tiny-1/samples?step=1").json()["groups"]
    assert group["images"] == group["samples"][0]["returned_images"] == [NAME]
    assert client.get(f"/api/runs/tiny-1/images/{NAME}").status_code == 404
    run.run.images_dir.mkdir()
    run.run.image_file(NAME).write_bytes(PNG)
    response = client.get(f"/api/runs/tiny-1/images/{NAME}")
    assert (response.status_code, response.content) == (200, PNG)
    assert response.headers["content-type"] == "image/png"
    assert response.headers["x-content-type-options"] == "nosniff"


EVIL_NAME = "'><img src=x onerror=alert(1)>"


@pytest.mark.parametrize(
    "name",
    [
        "..%2Frecipe.yaml",
        "%2e%2e/recipe.yaml",
        NAME.upper(),
        NAME + ".png",
        NAME + "%0A",
        "0" * 64,
        EVIL_NAME,
    ],
)
def test_nothing_else_is_served_as_a_picture(
    run: WrittenRun, client: TestClient, name: str
) -> None:
    """Nor a file whose content is not what its name says, as of a link to somewhere else."""
    run.run.images_dir.mkdir()
    run.run.image_file(NAME).write_bytes(PNG)
    run.run.image_file("0" * 64).symlink_to(run.run.recipe_file)
    assert client.get(f"/api/runs/tiny-1/images/{name}").status_code == 404
