"""A real engine with an adapter whose experts share their outer matrices: what it says is what the
merged model says in transformers, and what it holds is compared bit for bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.weights.channels import TensorChannel
from milescli.core.errors import MismatchError
from milescli.core.types import EngineAddress, WeightVersion
from milescli.export.adapter import adapter_of, read_adapter, write_adapter, write_merged
from milescli.models import load_facts, table
from milescli.models.adapter import ALL_LINEAR, SOLE_ADAPTER, LoraShape, adapter_table
from tests.backends.sglang.conftest import make_qwen3_moe
from tests.backends.sglang.inside.adapter_engine import adapter_engine

pytestmark = pytest.mark.engine
SHAPE = LoraShape(rank=4, alpha=8, targets=(ALL_LINEAR,), experts="shared_outer")
PROMPT = [5, 9, 100, 3, 77, 42, 8, 17, 4, 4, 90, 12]


def _random(model: Path, seed: int, scale: float) -> dict[str, torch.Tensor]:
    """By PEFT's names."""
    sizes = adapter_table(table(load_facts(model)), SHAPE).hf_shapes()
    chance = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(size, generator=chance) for name, size in sizes.items()}


def test_an_engine_says_what_the_merged_model_says(tmp_path: Path) -> None:
    import transformers

    model = tmp_path / "moe"
    base = make_qwen3_moe(model, moe_intermediate_size=32)  # as SGLang pads experts on a CPU
    of_adapter = adapter_table(table(load_facts(model)), SHAPE)
    blank, sent = _random(model, 0, 0.0), _random(model, 1, 0.1)
    write_adapter(tmp_path / "start", adapter_of(blank, of_adapter, SHAPE, base_model=model))

    async def said(engine: EngineAddress) -> list[list[float]]:
        fleet = SglangFleet(engines=[engine], adapter=SOLE_ADAPTER)
        channel = TensorChannel()
        await asyncio.to_thread(channel.open, [engine])
        rows = [list(await fleet.score(PROMPT))]
        await fleet.pause()
        await asyncio.to_thread(channel.send, iter([list(sent.items())]))
        await asyncio.to_thread(channel.verify, iter([list(sent.items())]))
        wrong = {name: t + 1e-3 if "down_proj.lora_B" in name else t for name, t in sent.items()}
        with pytest.raises(MismatchError, match="B of down_proj_moe in layer 0"):
            await asyncio.to_thread(channel.verify, iter([list(wrong.items())]))
        await fleet.resume(WeightVersion(fleet.version + 1))
        rows.append(list(await fleet.score(PROMPT)))
        await asyncio.to_thread(channel.close)
        await fleet.close()
        return rows

    with adapter_engine(tmp_path, model, tmp_path / "start", shares_outer=True) as engine:
        before, after = asyncio.run(said(engine))
    adapter = adapter_of(sent, of_adapter, SHAPE, base_model=model)
    write_merged(tmp_path / "merged", adapter, base=model)
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32
    )
    assert before == pytest.approx(_logprobs(base), abs=1e-5)
    assert after == pytest.approx(_logprobs(merged), abs=1e-5)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-2

    write_adapter(tmp_path / "given", adapter)
    read = read_adapter(tmp_path / "given")
    assert read.shared == adapter.shared and read.pairs.keys() == adapter.pairs.keys()
    for module, pair in adapter.pairs.items():
        assert all(map(torch.equal, read.pairs[module], pair)), module


def _logprobs(model: torch.nn.Module) -> list[float]:
    """[tokens - 1] of PROMPT."""
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
