"""Runs that learn from rows, with real Ray and Megatron-Core on a CPU: they end, go on bit for bit
where they were stopped, and what they write is what transformers reads."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import Workplace

COMMON = """\
model:
  scratch: {hidden_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 16,
            ffn_hidden_size: 128}
checkpoint: {every: 2, keep: 4}
run: {trackers: []}
eval: {every: 2, num_prompts: 8}
machine: {cpu_threads: 1, start_timeout_s: 240, step_timeout_s: 120}
"""
TRAIN = "train: {{objective: {objective}, steps: 4, batch_size: 8, optimizer: {{lr: 1e-3}}}}\n"
DATA = {
    "supervised": "data: {train: task:sums-worked, validation: task:sums-worked-heldout, "
    "eval: task:sums-heldout, max_row_tokens: 96}\n"
    "rollout: {max_response_tokens: 8, reward: gsm8k}\n",
    "preference": "data: {train: task:sums-pairs, validation: task:sums-pairs-heldout, "
    "demonstrations: task:sums, max_row_tokens: 96}\n"
    "warmup: {steps: 2, batch_size: 8}\n",
    "reward_model": "data: {train: task:sums-mistakes, validation: task:sums-mistakes-heldout, "
    "max_row_tokens: 96}\n",
}


def _recipe(workplace: Workplace, objective: str) -> str:
    name = f"{objective}.yaml"
    (workplace.folder / name).write_text(
        "description: A very small run for tests\n"
        + COMMON
        + TRAIN.format(objective=objective)
        + DATA[objective]
    )
    return name


@pytest.fixture(scope="module", params=DATA)
def whole(request: pytest.FixtureRequest, workplace: Workplace) -> str:
    """The name of a run of four steps without a break, which is its objective."""
    name = request.param
    finished = workplace.miles("launch", "--recipe", _recipe(workplace, name), "--name", name)
    assert finished.code == 0, finished
    assert "miles resume" in finished.out + finished.err
    return name


def _reports(workplace: Workplace, name: str) -> dict[int, dict]:
    """What each step said of itself, but for its times; the last word on each."""
    return {
        event["step"]: {
            key: value for key, value in event["report"].items() if not key.endswith("_s")
        }
        for event in workplace.events(name)
        if event["event"] == "RowStepDone"
    }


def _measured(workplace: Workplace, name: str) -> dict[int, tuple]:
    return {
        event["step"]: (event["loss"], event["figures"], event["num_rows"])
        for event in workplace.events(name)
        if event["event"] == "ValidationDone"
    }


def test_a_run_learns_and_measures(workplace: Workplace, whole: str) -> None:
    reports, measured = _reports(workplace, whole), _measured(workplace, whole)
    assert list(reports) == [1, 2, 3, 4] and list(measured) == [0, 2, 4]
    assert measured[4][0] < measured[0][0], "held-out rows are not learned"


@pytest.mark.parametrize("whole", ["supervised", "reward_model"], indirect=True)
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint(workplace: Workplace, whole: str) -> None:
    reports, measured = _reports(workplace, whole), _measured(workplace, whole)
    run = workplace.copy_run(whole, f"{whole}-again")
    shutil.rmtree(run / "checkpoints" / "step_4")
    (run / "events.jsonl").unlink()
    resumed = workplace.miles("resume", f"{whole}-again")
    assert resumed.code == 0, resumed
    later = _reports(workplace, f"{whole}-again")
    assert later == {step: reports[step] for step in (3, 4)}
    assert _measured(workplace, f"{whole}-again") == {4: measured[4]}
    assert later[4] != later[3]


@pytest.mark.parametrize("whole", ["preference"], indirect=True)
def test_a_run_that_was_stopped_says_what_the_one_says_that_was_not(
    workplace: Workplace, whole: str
) -> None:
    """Of the objective that has most to remember: a warm-up, and the log-probs of a reference. To
    be looked at meanwhile changes nothing."""
    recipe = _recipe(workplace, whole)
    process = workplace.start(
        "launch", "--recipe", recipe, "--name", "stopped", "--set", "checkpoint.every=0"
    )
    workplace.wait_for("stopped", lambda e: e["event"] == "RowStepDone", process)
    process.send_signal(signal.SIGTERM)
    stopped = workplace.finish(process)
    assert stopped.code == 75, stopped
    # a step takes 50 ms: the run goes on until the profile is taken
    resumed = workplace.start("resume", "stopped", "--steps", "100000")
    workplace.wait_for("stopped", lambda e: e.get("step") == 4, resumed)
    profiled = workplace.miles("profile", "stopped", "--steps", "1", "--quiet")
    resumed.send_signal(signal.SIGTERM)
    assert workplace.finish(resumed).code == 75
    assert profiled.code == 0, profiled
    assert "rank 0: " in profiled.out and "engine" not in profiled.out
    said, reports = _reports(workplace, "stopped"), _reports(workplace, whole)
    assert {step: said[step] for step in reports} == reports


def test_engines_answer_held_out_prompts_where_the_recipe_has_some(
    workplace: Workplace, whole: str
) -> None:
    evaluated = [e["step"] for e in workplace.events(whole) if e["event"] == "EvalDone"]
    engines = list((workplace.run(whole) / "logs" / "latest").glob("engine-*"))
    assert bool(engines) == (whole == "supervised")
    assert evaluated == ([0, 2, 4] if whole == "supervised" else [])


@pytest.mark.parametrize("whole", ["reward_model"], indirect=True)
def test_an_exported_reward_model_gives_transformers_the_scores_of_the_run(
    workplace: Workplace, whole: str, tmp_path: Path
) -> None:
    finished = workplace.miles("export", whole, "--to", str(tmp_path / "exported"))
    assert finished.code == 0, finished
    _, figures, num_rows = _measured(workplace, whole)[4]
    rows = workplace.run(whole) / "data" / "sums-mistakes-heldout.jsonl"
    chosen, rejected = _scores(tmp_path / "exported", rows, num_rows)
    assert figures["score_chosen"] == pytest.approx(sum(chosen) / num_rows, abs=1e-5)
    assert figures["score_rejected"] == pytest.approx(sum(rejected) / num_rows, abs=1e-5)


def _scores(folder: Path, rows: Path, count: int) -> tuple[list[float], list[float]]:
    """Of both sides of the first rows, as a user of transformers asks for them: in one batch,
    padded."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    pairs = [json.loads(line) for line in rows.read_text().splitlines()[:count]]
    texts = [
        tokenizer.apply_chat_template(
            [
                {"role": "user", "content": pair["prompt"]},
                {"role": "assistant", "content": pair[side]},
            ],
            tokenize=False,
        ).rstrip("\n")
        for side in ("chosen", "rejected")
        for pair in pairs
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        scores = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).logits[:, 0]
    return scores[:count].tolist(), scores[count:].tolist()
