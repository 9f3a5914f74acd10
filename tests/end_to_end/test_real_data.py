"""GSM8K, whole: a tiny model solves none of it, but every part of the path is real and its numbers
must be right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.runs import ROOT, Workplace

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
pytestmark = pytest.mark.skipif(
    not GSM8K.exists(), reason="the GSM8K files are not beside this checkout"
)
MAX_PROMPT_TOKENS = 160


def test_gsm8k_goes_through_template_length_policy_grader_and_truncation(
    workplace: Workplace,
) -> None:
    sets = (
        f"data.prompts={GSM8K / 'train.jsonl'}",
        f"data.eval={GSM8K / 'test.jsonl'}",
        "rollout.reward=gsm8k",
        "train.steps=2",
        f"data.max_prompt_tokens={MAX_PROMPT_TOKENS}",
        "rollout.max_response_tokens=24",
        "data.system_prompt=End with #### and the answer.",
    )
    finished = workplace.miles(
        "launch",
        "--recipe",
        "tiny.yaml",
        "--name",
        "gsm8k",
        *(word for pair in sets for word in ("--set", pair)),
    )
    assert finished.code == 0, finished
    run = workplace.run("gsm8k")
    report = json.loads((run / "manifest.json").read_text())["data"]["prompts"]
    lengths = _prompt_lengths(run / "model")
    assert report["num_rows"] == len(lengths) == 7473
    assert report["num_dropped"] == sum(length > MAX_PROMPT_TOKENS for length in lengths) > 0
    assert report["prompt_tokens_max"] == max(lengths)
    steps = workplace.steps("gsm8k")
    assert len(steps) == 2
    for step in steps:
        samples = [
            json.loads(line)
            for line in (run / "rollouts" / f"step_{step['step']}.jsonl").read_text().splitlines()
        ]
        truncated = sum(sample["stop_reason"] == "length" for sample in samples)
        assert step["rollout"]["truncated_fraction"] == pytest.approx(truncated / len(samples))
        assert step["rollout"]["response_tokens_max"] <= 24
        assert step["rollout"]["reward_mean"] == sum(sample["reward"] for sample in samples) / len(
            samples
        )


def _prompt_lengths(tokenizer_dir: Path) -> list[int]:
    """Independently of the program: template and tokenizer by hand."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    system = "<|im_start|>system\nEnd with #### and the answer.<|im_end|>\n"
    questions = [
        json.loads(line)["question"] for line in (GSM8K / "train.jsonl").read_text().splitlines()
    ]
    texts = [
        f"{system}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for question in questions
    ]
    return [
        len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]
