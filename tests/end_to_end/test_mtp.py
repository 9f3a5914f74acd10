"""An MTP layer in a whole run under pipeline and context parallelism: it learns, is sent to the
engine, and guesses there."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.models import parse_facts, table
from milescli.models.scratch import EOS_ID, INIT_STD, PAD_ID
from tests.backends.megatron.mtp_models import MODELS
from tests.end_to_end.runs import Workplace

VOCAB = 512
GUESSING = (
    "warmup.steps=10",
    "warmup.lr=1e-2",
    "rollout.speculative.kind=mtp",
    "rollout.speculative.guesses=2",
    "train.mtp.loss_weight=0.5",
    "weights.verify=true",
    "checkpoint.every=2",
    "engines.num=1",
    "eval.every=0",
)


def _sets(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def _model(folder: Path) -> Path:
    """A Qwen3-Next, whose layers keep a state, but for that of its MTP layer."""
    config = {
        **MODELS["mtpnext"],
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "vocab_size": VOCAB,
        "bos_token_id": PAD_ID,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
    }
    make_scratch_tokenizer(
        [f"{a} + {b} = {a + b}" for a in range(9) for b in range(9)], 512, folder
    )
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.ones if "linear_attn.norm" in name else torch.zeros)(shape)
        if "norm" in name
        else INIT_STD * torch.randn(shape, generator=generator)
        for name, shape in table(parse_facts(config)).hf_shapes().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_it_learns_and_guesses_under_pp_and_cp(workplace: Workplace) -> None:
    folder = _model(workplace.folder / "mtp-model")
    finished = workplace.miles(
        "launch", "--recipe", "tiny.yaml", "--name", "mtp", *_sets(
            "model.scratch=null", f"model.path={folder}", "parallel.pp=2", "parallel.cp=2",
            "train.steps=2", *GUESSING,
        ),
    )  # fmt: skip
    assert finished.code == 0, finished
    steps = workplace.steps("mtp")
    reports = [event["report"] for event in steps]
    assert [event["step"] for event in steps] == [1, 2]
    assert max(report["logprob_diff_max"] for report in reports) <= 1e-4
    losses = [report["figures"]["mtp_loss"] for report in reports]
    assert max(losses) < math.log(VOCAB) - 1, losses
    assert all(event["rollout"]["accept_length"] >= 1.0 for event in steps)
