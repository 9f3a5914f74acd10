"""Adapters that PEFT made, exported and merged: the logits are PEFT's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from milescli.console.output import Mode, Output
from milescli.core.errors import CheckpointError
from milescli.export.adapter import read_adapter, write_adapter
from milescli.export.peft import CONFIG_FILE
from milescli.models.base import read_config
from milescli.runtime.export import export_weights
from tests.export.test_adapter import adapter

IDS = torch.arange(5, 25)[None]
Q, QV = ["q_proj"], ["q_proj", "v_proj"]


@dataclass(frozen=True)
class Case:
    """One adapter."""

    settings: dict[str, object]
    tied: bool = False
    stays_tied: bool = True


CASES = {
    "plain": Case({"target_modules": QV}),
    "alpha of an end": Case({"target_modules": QV, "alpha_pattern": {"q_proj": 64}}),
    "alpha by expression": Case(
        {"target_modules": QV, "alpha_pattern": {r".*\.layers\.1\..*(q_proj|v_proj)$": 128}}
    ),
    "alpha of a whole name": Case(
        {"target_modules": QV, "alpha_pattern": {"^model.layers.1.self_attn.q_proj": 128}}
    ),
    "the first alpha wins": Case(
        {"target_modules": QV, "alpha_pattern": {"layers.1.self_attn.q_proj": 128, "q_proj": 16}}
    ),
    "ranks and alphas": Case(
        {
            "target_modules": QV,
            "rank_pattern": {r"layers\.1\..*": 8},
            "alpha_pattern": {r"layers\.1\..*": 32},
        }
    ),
    "rslora": Case({"target_modules": QV, "use_rslora": True, "rank_pattern": {"q_proj": 16}}),
    "a whole head": Case({"target_modules": Q, "modules_to_save": ["lm_head"]}),
    "tied: the embedding": Case(
        {"target_modules": Q, "modules_to_save": ["embed_tokens"]}, tied=True, stays_tied=False
    ),
    "tied: the head": Case(
        {"target_modules": Q, "modules_to_save": ["lm_head"]}, tied=True, stays_tied=False
    ),
    "tied: both": Case(
        {"target_modules": Q, "modules_to_save": ["embed_tokens", "lm_head"]},
        tied=True,
        stays_tied=False,
    ),
    "tied: both as one": Case(
        {"target_modules": Q, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        tied=True,
    ),
    "tied: pairs of the head": Case(
        {"target_modules": [*Q, "lm_head"]}, tied=True, stays_tied=False
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether its output layer is tied: a small Llama."""
    transformers = pytest.importorskip("transformers")
    folders = {}
    for tied in (False, True):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=tied,
        )
        folders[tied] = tmp_path_factory.mktemp(f"base-{tied}")
        transformers.LlamaForCausalLM(config).float().save_pretrained(folders[tied])
    return folders


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_of_peft_has_its_logits_merged_and_exported(
    name: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    case, load = CASES[name], transformers.AutoModelForCausalLM.from_pretrained
    base = bases[case.tied]
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **case.settings)
    model = peft.get_peft_model(load(base, dtype=torch.float32), config)
    for _, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "theirs")
    wanted = _logits(model)
    settings = {"step": None, "push": None, "private": True, "output": Output(Mode.QUIET)}
    for to, merge in (("merged", True), ("ours", False)):
        export_weights(
            tmp_path / "theirs",
            to=tmp_path / to,
            format="fp32" if merge else None,
            base=base,
            merge=merge,
            **settings,
        )
    again = peft.PeftModel.from_pretrained(load(base, dtype=torch.float32), tmp_path / "ours")
    for ours in (load(tmp_path / "merged", dtype=torch.float32), again):
        assert float((_logits(ours) - wanted).abs().max()) < 1e-5
    is_tied = read_config(tmp_path / "merged")["tie_word_embeddings"]
    assert is_tied == (case.tied and case.stays_tied)


@pytest.mark.parametrize("pattern", [{"(": 1}, {"q_proj": "much"}, ["q_proj"]])
def test_a_pattern_that_cannot_be_read_is_refused(pattern: object, tmp_path: Path) -> None:
    write_adapter(tmp_path, adapter())
    file = tmp_path / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "alpha_pattern": pattern}))
    with pytest.raises(CheckpointError, match="not a supported adapter") as refused:
        read_adapter(tmp_path)
    assert "alpha_pattern" in refused.value.why
