"""The model gives the log-probs that transformers gives, from the same folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.backends.megatron.conftest import Worlds
from tests.backends.megatron.layouts import TOKEN_ROWS

REFERENCE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
rows = []
for row in json.loads(sys.argv[2]):
    ids = torch.tensor([row])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    rows.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
print("ROWS" + json.dumps(rows))
"""
"""In a process of its own: the CPU shim changes torch, and transformers builds other models
then."""


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_scores_equal_those_of_transformers(
    worlds: Worlds, models: dict[str, str], model: str
) -> None:
    command = [sys.executable, "-c", REFERENCE, models[model], json.dumps(TOKEN_ROWS)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    expected = json.loads(done.stdout.rpartition("ROWS")[2])
    for one, other in zip(expected, worlds.get("one")[f"rows {model}"], strict=True):
        assert other[1:] == pytest.approx(one, abs=5e-6)
