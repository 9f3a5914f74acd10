"""A DeepSeek-V4 as it is released, in FP8 and FP4, learns from preferences beside its MTP layer and
its indexers: a whole run by the command line, without engines, which no CPU has for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.models.scratch import EOS_ID, PAD_ID
from tests.end_to_end.runs import Workplace
from tests.models.families.v4_release import write_release

RECIPE = """\
description: A very small run for tests
model: {path: v4, indexer: kl}
data: {train: task:sums-pairs, validation: task:sums-pairs-heldout, max_row_tokens: 160}
train: {objective: preference, steps: 4, batch_size: 8, mtp: {loss_weight: 0.3},
        optimizer: {lr: 1e-4}}
checkpoint: {every: 2, keep: 4}
eval: {every: 2, num_prompts: 8}
run: {trackers: []}
machine: {cpu_threads: 1, start_timeout_s: 240, step_timeout_s: 240}
"""


def _reports(workplace: Workplace, name: str) -> dict[int, dict]:
    return {
        event["step"]: {
            key: value for key, value in event["report"].items() if not key.endswith("_s")
        }
        for event in workplace.events(name)
        if event["event"] == "RowStepDone"
    }


def test_a_release_learns_from_preferences_goes_on_and_is_exported(workplace: Workplace) -> None:
    plain = write_release(
        workplace.folder / "v4", bos_token_id=PAD_ID, pad_token_id=PAD_ID, eos_token_id=EOS_ID
    )
    make_scratch_tokenizer(["What is 1 + 2?"], 512, workplace.folder / "v4")
    (workplace.folder / "v4.yaml").write_text(RECIPE)
    finished = workplace.miles("launch", "--recipe", "v4.yaml", "--name", "learns")
    assert finished.code == 0, finished
    reports = _reports(workplace, "learns")
    assert reports[1]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert reports[4]["loss"] < 0.69
    assert reports[1]["figures"]["mtp_loss"] > reports[4]["figures"]["mtp_loss"]

    assert reports[1]["figures"]["indexer_kl"] > 0

    run = workplace.copy_run("learns", "again")
    shutil.rmtree(run / "checkpoints" / "step_4")
    (run / "events.jsonl").unlink()
    resumed = workplace.miles("resume", "again")
    assert resumed.code == 0, resumed
    assert _reports(workplace, "again") == {step: reports[step] for step in (3, 4)}

    first, last = (_weights(workplace.export("learns", step=step)) for step in (0, 4))
    assert first.keys() == last.keys() == plain.keys()
    assert [
        name for name in plain if not torch.equal(first[name].float(), plain[name].float())
    ] == []
    assert not torch.equal(first["layers.3.attn.wkv.weight"], last["layers.3.attn.wkv.weight"])
    assert not torch.equal(first["mtp.0.e_proj.weight"], last["mtp.0.e_proj.weight"])
    scorer = "layers.1.attn.indexer.wq_b.weight"
    assert not torch.equal(first[scorer], last[scorer])


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
