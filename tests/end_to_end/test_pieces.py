"""A user's pieces of every kind in one run, which is stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.end_to_end.runs import Workplace

HERE = "tests.end_to_end.pieces"
PIECES = {
    "rollout.generation": "twice",
    "rollout.reward": "by_length",
    "rollout.filter": "hard",
    "rollout.selection": "last",
    "data.curriculum": "hardest",
    "train.before_log_probs": "looking",
    "model.layer_spec": "layers",
    "eval.function": "both",
    "weights.format": "copied",
    "run.hooks.all_samples": "all_samples",
}
SETS = [
    *(f"{key}={HERE}:{name}" for key, name in PIECES.items()),
    *("rollout.over_sampling=2.0", "train.updates_per_step=2", "train.optimizer.rule=muon"),
    *("train.optimizer.lr=3e-5", "weights.verify=true", "eval.num_prompts=4"),
    *("checkpoint.every=1", "data.curriculum_pool=2"),
]


def _launch(workplace: Workplace, name: str, steps: int, told: Path) -> list[str]:
    workplace.environment["MILES_TEST_TOLD"] = str(told)
    words = [word for text in [*SETS, f"train.steps={steps}"] for word in ("--set", text)]
    finished = workplace.miles("launch", "--recipe", "tiny.yaml", "--name", name, *words)
    assert finished.code == 0, finished
    return told.read_text().splitlines()


def _step(workplace: Workplace, name: str, number: int) -> tuple[dict, list[dict]]:
    (report,) = (
        event["report"]
        for event in workplace.events(name)
        if event["event"] == "StepDone" and event["step"] == number
    )
    exact = {key: report[key] for key in ("loss", "grad_norm", "figures", "num_tokens")}
    return exact, workplace.samples(name, number)


def test_pieces_of_every_kind_are_called_and_a_resumed_run_is_the_same(
    workplace: Workplace, tmp_path: Path
) -> None:
    told = _launch(workplace, "pieces", 3, tmp_path / "whole")
    assert [line for line in told if line.startswith("layer")] == ["layer 0", "layer 1"]
    assert sum(line.startswith("log-probs old") for line in told) >= 3
    assert [line.split()[:3] for line in told if line.startswith("step")] == [
        ["step", str(step), "4"] for step in (1, 2, 3)
    ]
    assert "knows 0" in told
    assert any(line.startswith("knows") and line != "knows 0" for line in told)
    rows = (workplace.run("pieces") / "eval" / "step_3.jsonl").read_text().splitlines()
    assert len(rows) == 2 * 4
    assert max(json.loads(row)["reward"] for row in rows) == 1.0

    again = workplace.resume_without("pieces", step=3)
    assert _step(workplace, again, 3) == _step(workplace, "pieces", 3)
