"""What was measured, and the samples behind it."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from milescli.core.events import ValidationDone
from milescli.runtime.evaluation.results import SetResult, write_result
from milescli.web import files
from tests.fake_run import WrittenRun, eval_done, row_step_done


def result(step: int, name: str) -> SetResult:
    return SetResult(
        model="runs/tiny-1",
        step=step,
        set=name,
        accuracy=0.5,
        num_prompts=2,
        samples_per_prompt=1,
        estimates={},
        domains={},
        truncated_fraction=0.0,
        response_tokens_mean=4.0,
        seconds=1.0,
        path=f"eval/{name}/step_{step}.jsonl",
        data_sha256="00",
        settings={},
        rewards=[0.0, 1.0],
    )


ROWS = [
    {"index": index, "response": f"#### {index}", "reward": 1.0, "response_ids": [1, 2, 3]}
    for index in range(7)
]


def test_evaluations_of_the_run_and_of_named_sets(run: WrittenRun, client: TestClient) -> None:
    run.tell(eval_done(0, 0.1), eval_done(20, 0.9))
    for step in (40, 3):
        write_result(result(step, "gsm8k"), ROWS, folder=run.path)
    (run.run.eval_dir / "gsm8k" / "step_7.json").write_text("{torn")
    (run.run.eval_dir / "step_9.json").symlink_to(run.path.parent / "step_1.json")
    told = client.get("/api/runs/tiny-1/evaluations").json()
    assert [(one["step"], one["accuracy"]) for one in told["evaluations"]] == [(0, 0.1), (20, 0.9)]
    assert told["evaluations"][0]["figures"]["truncated_fraction"] == 0.01
    assert [(one["set"], one["step"]) for one in told["sets"]] == [("gsm8k", 3), ("gsm8k", 40)]
    assert "rewards" not in told["sets"][0]


def test_losses_on_rows_that_were_held_out(run: WrittenRun, client: TestClient) -> None:
    run.tell(row_step_done(1), ValidationDone(step=1, loss=1.5, num_rows=8, seconds=0.5))
    told = client.get("/api/runs/tiny-1/evaluations").json()
    assert told["validations"] == [{"step": 1, "loss": 1.5, "seconds": 0.5, "figures": {}}]


@pytest.mark.parametrize("path", ["eval/gsm8k/step_3.jsonl", "gsm8k/step_3.jsonl"])
def test_samples_of_an_evaluation(run: WrittenRun, client: TestClient, path: str) -> None:
    write_result(result(3, "gsm8k"), ROWS, folder=run.path)
    url = f"/api/runs/tiny-1/evaluation-samples?path={path}"
    told = client.get(f"{url}&offset=2&limit=2").json()
    assert told["total"] == 7
    assert [one["index"] for one in told["samples"]] == [2, 3]
    assert "response_ids" not in told["samples"][0]
    assert len(client.get(url).json()["samples"]) == 7


def test_right_and_wrong_samples_of_an_evaluation(run: WrittenRun, client: TestClient) -> None:
    own = [{"index": 7, "reward": 1.0, "is_right": False}, {"index": 8, "reward": 0.25}]
    write_result(result(3, "gsm8k"), [*ROWS, *own], folder=run.path)
    url = "/api/runs/tiny-1/evaluation-samples?path=gsm8k/step_3.jsonl"
    wrong = client.get(f"{url}&only=wrong").json()
    assert [one["index"] for one in wrong["samples"]] == [7, 8]
    right = client.get(f"{url}&only=right&offset=5&limit=9").json()
    assert [one["index"] for one in right["samples"]] == [5, 6]
    assert (wrong["total"], right["total"], right["is_all"]) == (2, 7, True)


@pytest.mark.parametrize("only", ["", "&only=right"])
def test_a_file_that_was_not_counted_to_its_end_is_not_all(
    run: WrittenRun, client: TestClient, monkeypatch: pytest.MonkeyPatch, only: str
) -> None:
    monkeypatch.setattr(files, "COUNT_S", -1.0)
    write_result(result(3, "gsm8k"), ROWS, folder=run.path)
    url = f"/api/runs/tiny-1/evaluation-samples?path=gsm8k/step_3.jsonl{only}"
    assert client.get(url).json()["is_all"] is False


@pytest.mark.parametrize(
    "path",
    [
        "",
        "eval/",
        "../recipe.yaml",
        "eval/../events.jsonl",
        "/etc/passwd",
        "out.jsonl",
        "eval/gsm8k/step_3.json",
        "eval/none.jsonl",
    ],
)
def test_only_samples_below_eval_are_read(run: WrittenRun, client: TestClient, path: str) -> None:
    write_result(result(3, "gsm8k"), ROWS, folder=run.path)
    secret = run.path.parent / "secret.jsonl"
    secret.write_text(json.dumps({"secret": 1}))
    (run.run.eval_dir / "out.jsonl").symlink_to(secret)
    response = client.get("/api/runs/tiny-1/evaluation-samples", params={"path": path})
    assert response.status_code in (403, 404) and "samples" not in response.json()
