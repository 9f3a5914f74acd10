"""Pairs of engines of the same weights, one of which guesses: how they are made, what they are
asked, and what must be equal. Used by tests of speculation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.launch.speculation import Speculation
from milescli.backends.sglang.weights.channels import TensorChannel
from milescli.core.types import Guesses
from milescli.models import load_facts, parse_facts, table
from milescli.rollout.base import Completion, GenerateRequest
from tests.backends.sglang.conftest import EOS, VOCAB, Service, start_service, write_tokenizer
from tests.backends.sglang.weights.sending import BOUND_BYTES
from tests.buckets import into_buckets
from tests.families.cases import ALL
from tests.families.making import randomise

SAMPLED = [
    {"temperature": 0.0, "seed": None},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20},
]
DEEPSEEK = {
    **ALL["deepseek-v3"].config,
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_nextn_predict_layers": 1,
}
"""Of the family whose MTP layer is looked at most."""
Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two engines of the same weights."""

    kind: str
    guessing: Service
    plain: Service
    named: Named
    """Their weights, as the trainer sends them; of an MTP layer, too."""
    folder: Path

    def publish(self, named: Named) -> None:
        """To both."""
        for service in (self.guessing, self.plain):
            channel = TensorChannel(timeout_s=60)
            channel.open([service.address])
            service.publish(channel, buckets(named), version=1)
            channel.close()


def buckets(named: Named):
    return into_buckets(iter(named.items()), BOUND_BYTES)


def noisy(named: Named, *, scale: float, seed: int = 3) -> Named:
    """The same with some noise."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * tensor.std() * torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1
        else tensor
        for name, tensor in named.items()
    }


def make_mtp(folder: Path, config: dict[str, object], *, adds: float = 1.0) -> Named:
    """A model of that config whose layers add little to the embedding, so that its MTP layer, which
    takes the embedding, often guesses what the model says; with `adds` below 1, less still."""
    config = {
        **config,
        "vocab_size": VOCAB,
        "eos_token_id": EOS,
        "bos_token_id": 0,
        "max_position_embeddings": 2048,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    facts = parse_facts(config)
    named = {}
    for name, shape in table(facts).hf_shapes().items():
        around_zero = facts.norm_zero_centered and "linear_attn" not in name
        named[name] = (torch.ones if "norm" in name and not around_zero else torch.zeros)(shape)
    randomise(list(named.items()))
    for name, tensor in named.items():
        size = len(tensor)
        if "embed_tokens" in name or "lm_head" in name:
            tensor.mul_(6.0)
        elif name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            tensor[:, :size] += torch.eye(size)
        elif name.endswith("input_proj.weight"):
            tensor[:, size:] += torch.eye(size)
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.mul_(adds)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return named


def start_guessing(
    folder: Path, kind: str | None, draft: Path | None = None, *, records: bool = False
) -> Service:
    guessing = None
    if kind is not None:
        guesses, breadth = (5, 3) if kind == "ngram" else (3, 1)
        guessing = Speculation(
            kind=kind, num_guesses=guesses, draft_dir=draft, ngram_breadth=breadth
        )
    target = folder / f"engine-{kind}"
    target.mkdir()
    return start_service(
        folder,
        torch.nn.Module(),
        log_dir=target,
        speculation=guessing,
        return_routed_experts=records,
    )


def requests(**sampling: object) -> list[GenerateRequest]:
    """Two of each prompt; some end by their end-of-sequence token."""
    return [
        GenerateRequest(
            prompt_ids=[5 + number // 2, 6, 7, 8] * 4,
            max_new_tokens=64,
            **{"seed": 100 + number, **sampling},
        )
        for number in range(12)
    ]


async def responses(fleet: SglangFleet) -> list[Completion]:
    asked = [request for sampling in SAMPLED for request in requests(**sampling)]
    return await asyncio.gather(*map(fleet.generate, asked))


def require_same(guessed: list[Completion], plain: list[Completion]) -> Guesses:
    """What was guessed, where all the rest is equal."""
    total = Guesses()
    for one, other in zip(guessed, plain, strict=True):
        assert one.response_ids == other.response_ids
        assert one.stop_reason is other.stop_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert other.guesses == Guesses()
        total += one.guesses
    return total


def require_same_experts(pair: Pair) -> None:
    """What both engines, which keep records, tell of every token's experts."""
    facts = load_facts(pair.folder)
    shape = (facts.num_layers, facts.topk)

    async def recorded(fleet: SglangFleet) -> list[Completion]:
        asked = [replace(each, want_routed_experts=True) for each in requests()]
        return await asyncio.gather(*map(fleet.generate, asked))

    guessed = pair.guessing.run(recorded, routing_shape=shape)
    for one, other in zip(guessed, pair.plain.run(recorded, routing_shape=shape), strict=True):
        assert one.routed_experts is not None
        assert one.routed_experts.num_tokens == 16 + len(one.response_ids) - 1
        assert one.routed_experts == other.routed_experts
    assert sum(made.guesses.num_right for made in guessed) > 0
