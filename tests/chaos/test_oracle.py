"""The oracle finds what is wrong: each test makes it so."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.chaos.oracle import (
    compared,
    figures_that_are_far,
    figures_that_differ,
    intact_records,
    losses_that_differ,
    samples_that_differ,
    tensors_of,
)


def _step(step: int, **report: float) -> dict:
    report = {"loss": 0.5, "optimizer_s": 0.1, "logprob_diff_max": 1e-7} | report
    return {"event": "StepDone", "step": step, "report": report, "rollout": {"reward_mean": 0.25}}


def test_figures_may_differ_in_seconds_and_engine_log_probs_alone() -> None:
    calm = [_step(1), _step(2)]
    assert figures_that_differ([_step(1, optimizer_s=9, logprob_diff_max=0), _step(2)], calm) == []
    assert figures_that_differ([_step(1), _step(2, loss=0.5000001)], calm) == [
        "StepDone 2 differs in loss"
    ]


def test_a_step_that_is_done_again_must_be_the_same_and_none_may_be_lost_or_new() -> None:
    calm = [_step(1), _step(2)]
    assert figures_that_differ([_step(1), _step(1, loss=0.1), _step(2)], calm) == [
        "StepDone 1 differs in loss"
    ]
    assert figures_that_differ([_step(1)], calm) == ["StepDone 2 is not there"]
    assert figures_that_differ([*calm, _step(3)], calm) == ["StepDone 3 is no step of the calm run"]


def test_samples_that_are_lost_doubled_or_other_are_found(tmp_path: Path) -> None:
    lines = {"calm": "a\nb\n", "same": "a\nb\n", "doubled": "a\nb\nb\n", "other": "a\nc\n"}
    for name, text in lines.items():
        (tmp_path / name / "rollouts").mkdir(parents=True)
        (tmp_path / name / "rollouts" / "step_1.jsonl").write_text(text)
    (tmp_path / "lost").mkdir()
    differ = {
        name: samples_that_differ(tmp_path / name, tmp_path / "calm")
        for name in ("same", "doubled", "other", "lost")
    }
    file = "rollouts/step_1.jsonl"
    assert differ == {
        "same": [],
        "doubled": [f"{file} has 3 samples, not 2"],
        "other": [f"{file} has other samples"],
        "lost": [f"{file} is not there"],
    }


def _lost(worker: str) -> dict:
    return {"event": "WorkerLost", "worker": worker, "what": f"{worker} died"}


def _replaced(worker: str, seconds: float) -> dict:
    return {"event": "WorkerReplaced", "worker": worker, "seconds": seconds}


def test_each_loss_needs_its_replacement_in_time_and_the_victim_is_named() -> None:
    def wrong(*events: dict) -> list[str]:
        return losses_that_differ(events, said="engine 0", within_s=30)

    assert wrong(_lost("engine 0"), _replaced("engine 0", 5)) == []
    assert wrong() == ["no worker was lost"]
    assert wrong(_lost("engine 0")) == ["engine 0 was never replaced"]
    assert wrong(_lost("engine 0"), _replaced("engine 0", 31)) == [
        "engine 0 was replaced after 31 s"
    ]
    assert wrong(_lost("engine 1"), _replaced("engine 1", 5))[0].startswith("lost was engine 1")


def test_one_bit_of_one_tensor_is_found(tmp_path: Path) -> None:
    runs = {}
    for name, value in (("calm", 1.0), ("same", 1.0), ("hurt", 1.0000001)):
        run = runs[name] = tmp_path / name
        folder = run / "checkpoints" / "step_16"
        folder.mkdir(parents=True)
        tree = {"model": {"weight": torch.tensor([value, 2.0]), "bias": torch.zeros(2)}}
        dcp.save(tree, checkpoint_id=folder, no_dist=True)
        (folder / "manifest.json").touch()
        (run / "events.jsonl").write_text(json.dumps(_step(1)) + "\n")
    assert set(tensors_of(runs["calm"] / "checkpoints" / "step_16")) == {
        "/model/weight",
        "/model/bias",
    }
    assert compared(runs["same"], runs["calm"]) == []
    assert compared(runs["hurt"], runs["calm"]) == ["1 of 2 tensors differ: /model/weight"]
    (runs["same"] / "checkpoints" / "step_16" / "manifest.json").unlink()
    assert len(compared(runs["same"], runs["calm"])) == 1


def test_what_a_full_disk_tore_is_left_out_and_what_was_told_must_be_right() -> None:
    assert intact_records(['{"step": 1}', '{"a": {}', "", '{"step": 3}']) == [
        {"step": 1},
        {"step": 3},
    ]


def test_on_fewer_nodes_every_step_must_be_there_and_near() -> None:
    calm = [_step(1), _step(2)]
    assert figures_that_are_far([_step(1), _step(2, loss=0.51)], calm) == []
    assert figures_that_are_far([_step(1)], calm) == ["StepDone 2 is not there"]
    assert figures_that_are_far([_step(1), _step(2, loss=float("nan"))], calm) == [
        "StepDone 2: loss is nan, not near 0.5"
    ]
    assert figures_that_are_far([*calm, _step(3)], calm) == [
        "StepDone 3 is no step of the calm run"
    ]


def test_only_log_probs_of_engines_may_differ_in_a_kept_sample(tmp_path: Path) -> None:
    for name, engine, trainer in (("calm", -0.1, -0.1), ("hurt", -0.2, -0.1), ("bad", -0.1, -0.2)):
        (tmp_path / name / "rollouts").mkdir(parents=True)
        line = {"text": "a", "logprobs": [engine], "trainer_logprobs": [trainer]}
        text = json.dumps({"response": "a", "lines": [line]}) + "\n"
        (tmp_path / name / "rollouts" / "step_1.jsonl").write_text(text)
    assert samples_that_differ(tmp_path / "hurt", tmp_path / "calm") == []
    assert len(samples_that_differ(tmp_path / "bad", tmp_path / "calm")) == 1


def test_seconds_of_an_environment_are_no_difference(tmp_path: Path) -> None:
    for name, seconds, text in (("calm", 0.1, "a"), ("hurt", 0.2, "a"), ("other", 0.1, "b")):
        (tmp_path / name / "rollouts").mkdir(parents=True)
        sample = {"response": text, "episode": {"turns": 3, "environment_s": seconds}}
        (tmp_path / name / "rollouts" / "step_1.jsonl").write_text(json.dumps(sample) + "\n")
    assert samples_that_differ(tmp_path / "hurt", tmp_path / "calm") == []
    assert samples_that_differ(tmp_path / "other", tmp_path / "calm") == [
        "rollouts/step_1.jsonl has other samples"
    ]
