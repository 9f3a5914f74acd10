"""LoRA adapters: PEFT's own folders are read, ours are read by PEFT, and the merge is PEFT's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milescli.core.errors import CheckpointError
from milescli.export.adapter import (
    Adapter,
    merge_into,
    merge_weight,
    read_adapter,
    write_adapter,
)
from milescli.export.adapter_folder import write_adapter_folder
from milescli.export.peft import CONFIG_FILE
from milescli.models.adapter import PEFT_WEIGHTS

OUT, IN = 12, 20
MODULE = "model.layers.0.self_attn.q_proj"


def adapter(*, rank: int = 4, alpha: float = 8, **settings: object) -> Adapter:
    """With two modules."""
    generator = torch.Generator().manual_seed(0)
    pairs = {
        name: (
            torch.randn(rank, IN, generator=generator),
            torch.randn(OUT, rank, generator=generator),
        )
        for name in (MODULE, "model.layers.1.mlp.up_proj")
    }
    return Adapter(pairs=pairs, alpha=alpha, rank=rank, base_model="Qwen/Qwen3-0.6B", **settings)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = adapter(saved={"lm_head.weight": torch.randn(3, 4)})
    write_adapter(tmp_path, written)
    read = read_adapter(tmp_path)
    assert read.pairs.keys() == written.pairs.keys() and read.base_model == "Qwen/Qwen3-0.6B"
    assert all(
        torch.equal(a, b)
        for name in written.pairs
        for a, b in zip(read.pairs[name], written.pairs[name], strict=True)
    )
    assert read.scaling(MODULE) == 2.0 and torch.equal(
        read.saved["lm_head.weight"], written.saved["lm_head.weight"]
    )
    assert set(load_file(tmp_path / PEFT_WEIGHTS)) >= {
        f"base_model.model.{MODULE}.lora_{half}.weight" for half in "AB"
    }


@pytest.mark.parametrize("use_rslora", [False, True])
def test_the_merge_is_that_of_peft(tmp_path: Path, use_rslora: bool) -> None:
    peft = pytest.importorskip("peft")

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = torch.nn.Linear(IN, OUT, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up_proj(x)

        def prepare_inputs_for_generation(self) -> None:
            """PEFT asks every causal model for it."""

    torch.manual_seed(0)
    base = Small()
    plain = base.up_proj.weight.detach().clone()
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["up_proj"],
        use_rslora=use_rslora,
        init_lora_weights=False,
    )
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "theirs", safe_serialization=True)
    read = read_adapter(tmp_path / "theirs")
    first, second = read.pairs["up_proj"]
    ours = merge_weight(plain, first, second, scaling=read.scaling("up_proj"))
    # ours, written again as alpha / r, must be the same to PEFT
    write_adapter_folder(tmp_path / "ours", read)
    again = peft.PeftModel.from_pretrained(Small(), tmp_path / "ours")
    again.base_model.model.up_proj.base_layer.weight.data.copy_(plain)
    for peft_model in (model, again):
        theirs = peft_model.merge_and_unload().up_proj.weight
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert float((ours - plain).abs().max()) > 0.01


def test_the_scaling_is_written_so_that_sglang_reads_it(tmp_path: Path) -> None:
    """SGLang 0.5.20 (lora/lora.py) takes lora_alpha / r, whatever use_rslora and alpha_pattern
    say."""
    write_adapter(tmp_path, adapter(rank=16, alpha=4, use_rslora=True, alphas={MODULE: 8.0}))
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    tensors = load_file(tmp_path / PEFT_WEIGHTS)
    for module, alpha in ((MODULE, 8), ("model.layers.1.mlp.up_proj", 4)):
        first, second = (tensors[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")
        served = config["lora_alpha"] / config["r"] * (second @ first)
        own_first, own_second = adapter(rank=16).pairs[module]
        assert torch.allclose(
            served, alpha / math.sqrt(16) * (own_second @ own_first), rtol=1e-5, atol=1e-5
        )


def test_a_bfloat16_weight_is_rounded_once() -> None:
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    first, second = (tensor.to(torch.bfloat16) for tensor in adapter().pairs[MODULE])
    exact = weight.double() + 2.0 * (second.double() @ first.double())
    assert torch.equal(
        merge_weight(weight, first, second, scaling=2.0), exact.float().to(torch.bfloat16)
    )


def test_modules_that_the_base_has_not_and_other_shapes_are_refused() -> None:
    base = {f"{module}.weight": torch.zeros(OUT, IN) for module in adapter().pairs}
    assert {name for name, _ in merge_into(base.items(), adapter())} == set(base)
    lacking = {name: tensor for name, tensor in base.items() if "layers.1" not in name}
    with pytest.raises(CheckpointError) as caught:
        list(merge_into(lacking.items(), adapter()))
    assert "model.layers.1.mlp.up_proj" in caught.value.why
    with pytest.raises(CheckpointError) as caught:
        list(merge_into({**base, f"{MODULE}.weight": torch.zeros(OUT + 1, IN)}.items(), adapter()))
    assert "[13, 20]" in caught.value.why and "[12, 20]" in caught.value.why


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "bias: all"),
        ({"r": 0}, "r: 0"),
        ({"lora_alpha": None}, "lora_alpha: None"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
    ],
)
def test_what_is_no_plain_lora_is_refused(tmp_path: Path, changes: dict, says: str) -> None:
    write_adapter(tmp_path, adapter())
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError) as caught:
        read_adapter(tmp_path)
    assert says in caught.value.why


def test_folders_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, adapter())
    tensors = load_file(tmp_path / PEFT_WEIGHTS)
    half = f"base_model.model.{MODULE}.lora_B.weight"

    def why() -> str:
        with pytest.raises(CheckpointError) as caught:
            read_adapter(tmp_path)
        return caught.value.why

    save_file(
        {name: tensor for name, tensor in tensors.items() if name != half}, tmp_path / PEFT_WEIGHTS
    )
    assert "only one of lora_A and lora_B" in why()
    save_file({**tensors, half: torch.zeros(OUT, 5)}, tmp_path / PEFT_WEIGHTS)
    assert "B [12, 5]" in why()
    save_file(
        {**tensors, f"base_model.model.{MODULE}.lora_magnitude_vector": torch.zeros(OUT)},
        tmp_path / PEFT_WEIGHTS,
    )
    assert "magnitude" in why()
    (tmp_path / PEFT_WEIGHTS).rename(tmp_path / "adapter_model.bin")
    assert "pickle" in why()
    (tmp_path / CONFIG_FILE).write_text("{")
    assert CONFIG_FILE in why()


def test_a_clean_copy_has_a_card_and_nothing_else(tmp_path: Path) -> None:
    notes = write_adapter_folder(tmp_path / "out", adapter(use_rslora=True))
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        CONFIG_FILE,
        PEFT_WEIGHTS,
        "README.md",
    }
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: peft" in card and "from peft import" in card
    assert (
        "base_model: Qwen/Qwen3-0.6B" in card
        and "--lora-paths" in card
        and any("use_rslora" in note for note in notes)
    )


def test_what_experts_share_counts_once_and_is_no_business_of_peft(tmp_path: Path) -> None:
    up, down = torch.ones(2, 8), torch.ones(8, 2)
    experts = [f"model.layers.0.mlp.experts.{expert}" for expert in range(3)]
    pairs = {f"{each}.up_proj": (up, torch.randn(4, 2)) for each in experts}
    pairs |= {f"{each}.down_proj": (torch.randn(2, 4), down) for each in experts}
    outer = "model.layers.0.mlp.experts"
    shared = {f"{outer}.up_proj": "lora_A", f"{outer}.down_proj": "lora_B"}
    made = Adapter(pairs=pairs, alpha=4, rank=2, shared=shared)
    assert made.num_parameters == 2 * 16 + 6 * 8
    notes = write_adapter_folder(tmp_path / "out", made)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "peft" not in card.replace("PEFT has no such form", "").lower()
    assert any("--experts-shared-outer-loras" in note for note in notes)
    read = read_adapter(tmp_path / "out")
    assert read.shared == shared and read.num_parameters == made.num_parameters
    assert all(torch.equal(read.pairs[name][0], pair[0]) for name, pair in pairs.items())
