"""SmolLM2-135M learns from rows: its losses are those that transformers computes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.end_to_end.real_models.settings import ROWS, words
from tests.end_to_end.runs import Workplace

pytestmark = [pytest.mark.ray, pytest.mark.trainer, pytest.mark.thorough]


def _launch(workplace: Workplace, recipe: str, *options: str) -> dict[str, list[dict]]:
    """A run from its launch to its end: its events by their kinds."""
    finished = workplace.miles("launch", "--recipe", recipe, "--name", recipe, *options)
    assert finished.code == 0, finished
    events: dict[str, list[dict]] = {}
    for event in workplace.events(recipe):
        events.setdefault(event["event"], []).append(event)
    return events


def test_sft_learns_from_the_loss_that_transformers_has(
    workplace: Workplace, smollm2: Path, tmp_path: Path
) -> None:
    settings = {"eval.every": 3, "train.optimizer.lr": 1e-4, "checkpoint.every": 3}
    events = _launch(workplace, "quickstart-sft", "--steps", "3", *words(smollm2, ROWS, settings))
    before, after = events["ValidationDone"]
    rows = workplace.run("quickstart-sft") / "data" / "sums-worked-heldout.jsonl"
    assert before["loss"] == pytest.approx(_loss(smollm2, rows, before["num_rows"]), rel=1e-4)
    assert after["loss"] < before["loss"]
    # bfloat16, which the model is in, would round most of so few steps off
    exported = tmp_path / "exported"
    to = ("--to", str(exported), "--format", "fp32")
    finished = workplace.miles("export", "quickstart-sft", *to)
    assert finished.code == 0, finished
    assert after["loss"] == pytest.approx(_loss(exported, rows, after["num_rows"]), rel=1e-4)


def _loss(folder: Path, rows: Path, count: int) -> float:
    """Of the tokens of the answers to the first rows, in nats: one after the other."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for row in map(json.loads, rows.read_text().splitlines()[:count]):
        turns = [{"role": "user", "content": row["prompt"]}]
        asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        text = f"{asked}{row['demonstration']}{tokenizer.eos_token}"
        prompt, ids = (
            tokenizer(part, add_special_tokens=False)["input_ids"] for part in (asked, text)
        )
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        answer = torch.tensor(ids[len(prompt) :])
        losses += torch.nn.functional.cross_entropy(logits, answer, reduction="none").tolist()
    return math.fsum(losses) / len(losses)


def test_dpo_begins_at_its_reference_and_leaves_it(workplace: Workplace, smollm2: Path) -> None:
    settings = {
        "warmup.steps": 0,
        "data.demonstrations": "null",
        "train.preference.sft_weight": 0,
        "train.optimizer.lr": 1e-5,
        "train.optimizer.schedule": "constant",
    }
    events = _launch(workplace, "quickstart-dpo", "--steps", "2", *words(smollm2, ROWS, settings))
    first, second = (event["report"] for event in events["RowStepDone"])
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["grad_norm"] > 0 and abs(second["loss"] - math.log(2)) > 1e-3
