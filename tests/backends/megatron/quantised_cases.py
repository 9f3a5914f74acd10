"""Ranks that multiply by rounded weights: which models, under which layouts, and what they say."""

from __future__ import annotations

import hashlib

import torch

from milescli.backends.megatron.layers.grouped_experts import GroupedExperts
from milescli.backends.megatron.state import snapshot
from tests.backends.megatron.harness import policy_shard, scores_everywhere, trainer
from tests.backends.megatron.latent_models import LATENT
from tests.backends.megatron.shard_cases import shard_checksums
from tests.backends.megatron.tiny_models import DENSE

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
MODELS = {
    "dense": {**DENSE, **SIZES, "intermediate_size": 512, "num_hidden_layers": 2},
    "odd": {**DENSE, "tie_word_embeddings": True, "num_hidden_layers": 3},
    "moe": {
        **DENSE,
        **SIZES,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "latent": {
        **LATENT,
        "hidden_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
    },
}
"""`odd` has matrices that blocks do not divide."""
FORMS = ("fp8", "mxfp8", "int4", "nvfp4")


def case(name: str, model: str, form: str | None, **options: object) -> dict:
    """Of `quantised_steps`, under a layout of `options`."""
    train, inputs = options.pop("train", None), options.pop("inputs", False)
    looped = options.pop("looped", False)
    return {
        "name": name,
        "call": "quantised_steps",
        "model": model,
        "formats": {"trainer_format": form, "engine_format": form, "quantises_inputs": inputs},
        "layout": options,
        "train": train,
        "looped": looped,
    }


def reference_steps(
    *, rank: int, size: int, port: int, model: str, form: str, copies: bool
) -> list[tuple[float, float]]:
    """Losses and gradient norms of steps with a KL term. `copies`: the reference is copied to where
    the policy's weights were, as on a device."""
    if copies:
        snapshot._is_on_host = lambda parameters: False
    formats = {"trainer_format": form, "engine_format": form, "quantises_inputs": False}
    world = {"rank": rank, "size": size, "port": port, "layout": {}}
    made = trainer(model=model, train={"kl_coef": 0.1}, formats=formats, **world)
    made.freeze_reference()
    reports = [made.step(policy_shard(made, step), 3e-2).report for step in range(2)]
    made.close()
    return [(each.loss, each.grad_norm) for each in reports]


def sha256_of(tensor: torch.Tensor) -> str:
    """Of its bytes."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy()).hexdigest()


def quantised_steps(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    formats: dict,
    layout: dict,
    train: dict | None,
    looped: bool,
) -> dict:
    """Scores, what is published, then two policy steps in several microbatches, and scores.
    `looped`: Megatron computes one expert after the other."""
    grouped = set[bool]()
    can_group = GroupedExperts._can_group

    def noted(experts: GroupedExperts) -> bool:
        grouped.add(answer := can_group(experts) and not looped)
        return answer

    GroupedExperts._can_group = noted
    made = trainer(
        rank=rank, size=size, port=port, model=model, layout=layout, train=train, formats=formats
    )
    shard = policy_shard(made, 9)
    first = scores_everywhere(made, shard)
    published = {
        name: sha256_of(tensor)
        for bucket in made.policy.buckets_for_engines()
        for name, tensor in bucket
    }
    in_shards = shard_checksums(made)
    whole = formats["engine_format"] == "nvfp4" or made.policy.adapters is not None
    assert in_shards == (None if whole else published)
    reports = [made.step(policy_shard(made, step), 1e-2).report for step in range(2)]
    last = scores_everywhere(made, shard)
    made.close()
    return {
        "first": first,
        "published": published,
        "losses": [(each.loss, each.grad_norm) for each in reports],
        "last": last,
        "grouped": grouped,
    }
