"""Runs of LoRA, speculation, routing replay and rollout beside training, of which each covers what
the table says: they end well, engine and trainer agree, and each feature leaves its mark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.models.scratch import make_model
from milescli.recipe.model import ScratchModel
from tests.backends.sglang.inside.cpu.guessing import DEEPSEEK, make_mtp
from tests.end_to_end.combinations import RUNS, Combination
from tests.end_to_end.runs import Workplace

VOCAB = 300
POLICY = ScratchModel(
    family="qwen3_moe",
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    num_experts=4,
    moe_ffn_hidden_size=32,
    vocab_size=VOCAB,
    tie_embeddings=False,
)
RECIPE = """\
description: Two steps of a very small mixture of experts
data: {prompts: task:sums, max_prompt_tokens: 160}
rollout: {prompts_per_step: 2, samples_per_prompt: 4, max_response_tokens: 24,
          reward: "tests.end_to_end.rewards:variety"}
train: {steps: 2, optimizer: {lr: 1e-3}, lora: {experts: shared_outer}}
weights: {verify: true}
checkpoint: {every: 2}
eval: {every: 0}
run: {trackers: []}
machine: {cpu_threads: 1, start_timeout_s: 240, step_timeout_s: 120}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models of one tokenizer, by what they are for."""
    base = tmp_path_factory.mktemp("models")
    make_model(POLICY, base / "policy", seed=0)
    small = ScratchModel(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
                         ffn_hidden_size=64, vocab_size=VOCAB)  # fmt: skip
    make_model(small, base / "draft", seed=1)
    make_mtp(base / "mtp", DEEPSEEK)
    for folder in base.iterdir():
        make_scratch_tokenizer(["What is 47 + 38? 85"], VOCAB, folder)
    return base


def _keep_ngrams(workplace: Workplace) -> None:
    """SGLang builds their C++ for half a minute, in the home of who runs it."""
    ours, theirs = (home / ".cache" / "sglang" for home in (workplace.folder, Path.home()))
    if not ours.exists():
        theirs.mkdir(parents=True, exist_ok=True)
        ours.parent.mkdir(exist_ok=True)
        ours.symlink_to(theirs)


def _name(run: Combination) -> str:
    words = [
        "adapter" if run.lora else "whole",
        run.speculation,
        "replay" if run.replay else "free",
        f"{run.order}-{run.on_update}" if run.max_staleness else "strict",
    ]
    return "-".join(words)


@pytest.mark.parametrize("run", RUNS, ids=_name)
def test_features_go_together(workplace: Workplace, models: Path, run: Combination) -> None:
    name = _name(run)
    (workplace.folder / "combined.yaml").write_text(RECIPE)
    _keep_ngrams(workplace)
    policy = models / ("mtp" if run.speculation == "mtp" else "policy")
    sets = [f"model.path={policy}", *run.sets(models / "draft")]
    words = [word for pair in sets for word in ("--set", pair)]
    done = workplace.miles("launch", "--recipe", "combined.yaml", "--name", name, *words)
    assert done.code == 0, done
    steps = workplace.steps(name)
    assert [event["step"] for event in steps] == [1, 2]
    assert steps[0]["rollout"]["staleness_max"] == 0
    for event in steps:
        _require_marks(run, event)
    checkpoint = workplace.run(name) / "checkpoints" / "step_2"
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert ("adapter.json" in files) == run.lora


def _require_marks(run: Combination, event: Mapping[str, Any]) -> None:
    """Of one step. Engine and trainer agree where what is trained on is of the last weights."""
    report, rollout = event["report"], event["rollout"]
    assert rollout["staleness_max"] > 0 or report["logprob_diff_max"] < 1e-4
    assert ("routes_differ" in report["figures"]) == run.replay
    assert (rollout["accept_length"] is not None) == (run.speculation != "none")
    assert rollout["staleness_max"] <= run.max_staleness
