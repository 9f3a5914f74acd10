"""Defines the section `model`: the model that is trained. With its rules."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.recipe.section import (
    NonNegative,
    Positive,
    PositiveFloat,
    Rule,
    Section,
    divisor_below,
)

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe

VisionMode = Literal["frozen", "projector", "all"]
IndexerMode = Literal["frozen", "kl"]
MIN_VOCAB_SIZE = 272
"""256 bytes plus the special tokens of a chat template."""


class ScratchModel(Section):
    """A small model that miles creates from a seed, instead of downloading one."""

    family: Literal["qwen3", "qwen3_moe", "qwen2_5_vl"] = "qwen3"
    """Model family; qwen2_5_vl accepts images."""
    hidden_size: Positive = 128
    num_layers: Annotated[int, Field(ge=1, le=1000)] = 4
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    head_dim: Positive = 32
    ffn_hidden_size: Positive = 384
    num_experts: NonNegative = 0
    """Number of experts; 0 for a dense model. Above 0, `family: qwen3_moe` is needed."""
    topk: Positive = 2
    """Number of experts per token."""
    moe_ffn_hidden_size: Positive = 128
    vocab_size: Positive = 512
    """Size of the byte-level BPE vocabulary, which is trained on the text of the task."""
    vocabulary: str | None = None
    """File or `task:NAME` whose text trains the vocabulary, so that two models can share their
    tokens; null: the first source that `data` names."""
    tie_embeddings: bool = True
    rope_theta: PositiveFloat = 10_000.0
    max_position_embeddings: Positive = 4096
    vision_layers: Positive = 2
    """Size of the vision tower of a model that accepts images."""
    vision_hidden_size: Annotated[int, Field(ge=4, multiple_of=8)] = 64


class Model(Section):
    """Which model to train."""

    path: str | None = None
    """A Hugging Face folder or hub name; or another run (its newest checkpoint), or
    `RUN/checkpoints/step_N`."""
    revision: str | None = None
    """Revision on the hub (branch, tag or commit)."""
    scratch: ScratchModel | None = None
    """Create a small model instead. Set exactly one of `path` and `scratch`."""
    adapter: str | None = None
    """Folder of a PEFT LoRA adapter (safetensors) for this model, from which `train.lora` starts;
    null: a new adapter."""
    layer_spec: str = "default"
    """Construction of the trainer's layers: default, or an import path to a function that changes
    Megatron's layer spec. It does not affect the engines."""
    vision: VisionMode = "frozen"
    """Which weights of a vision tower to train: frozen: none; projector: those that map its
    features to the decoder's tokens; all. The decoder is always trained."""
    indexer: IndexerMode = "frozen"
    """Training of sparse attention's indexer, which selects positions: frozen; kl: by its
    divergence from the attention's own weights at the selected positions."""
    allow_unproven: bool = False
    """Allow training of a family that has no independent implementation to compare with (`miles
    models` lists them)."""


def rules(recipe: Recipe, origins: Mapping[str, object]) -> Iterator[Rule]:
    """Yield the rules for the choice of the model, and for `scratch`."""
    model = recipe.model
    yield Rule(
        model.path is None and model.scratch is None,
        "the recipe does not name a model",
        why="set either `model.path` (a Hugging Face folder or hub name) or `model.scratch` (a "
        "small model that miles creates)",
        fix=["--set model.path=Qwen/Qwen3-0.6B", "--set model.scratch={}"],
    )
    of_path = f"model.path={shlex.quote(str(model.path))}"
    yield Rule(
        model.path is not None and model.scratch is not None,
        "the recipe names two models",
        why=f"`model.path` is `{model.path}` ({origins['model.path']}), and `model.scratch` is "
        f"set too ({origins['model.scratch.hidden_size']}); a run trains only one model",
        fix=[
            f"miles launch --recipe qwen3-0.6b --set {of_path}   # or another that is made for a "
            "pretrained model: miles recipes",
            f"--set {of_path} --set model.scratch=null --set warmup.steps=0 "
            f"--set train.optimizer.lr=1e-6   # {recipe.train.optimizer.lr:g} suits a "
            "model that was made from a seed",
            "--set model.path=null",
        ],
    )
    yield Rule(
        model.path is not None and not model.path.strip(),
        "`model.path` is empty",
        why=f"{origins['model.path']} sets it",
        fix="--set model.path=Qwen/Qwen3-0.6B",
    )
    yield Rule(
        model.revision is not None and model.path is None,
        f"`model.revision` is `{model.revision}`, but the model is not downloaded",
        why="a revision belongs to `model.path`, but this recipe creates its model from scratch",
        fix="--set model.revision=null",
    )
    yield Rule(
        model.vision != "frozen" and recipe.train.lora.is_on,
        f"`model.vision={model.vision}` cannot train a vision tower together with an adapter",
        why="an adapter (`train.lora.rank`) freezes all weights of the model",
        fix=["--set model.vision=frozen", "--set train.lora.rank=null"],
    )
    yield Rule(
        model.indexer != "frozen" and recipe.train.lora.is_on,
        f"`model.indexer={model.indexer}` cannot train an indexer together with an adapter",
        why="an adapter (`train.lora.rank`) freezes all weights of the model",
        fix=["--set model.indexer=frozen", "--set train.lora.rank=null"],
    )
    if model.scratch is not None:
        yield from _shape_rules(recipe, model.scratch)
        yield from _expert_rules(model.scratch)


def _shape_rules(recipe: Recipe, scratch: ScratchModel) -> Iterator[Rule]:
    heads, kv_heads, size = scratch.num_heads, scratch.num_kv_heads, scratch.vocab_size
    longest, positions = recipe.longest_sequence, scratch.max_position_embeddings
    yield Rule(
        heads % kv_heads,
        f"{heads} heads cannot share {kv_heads} KV heads",
        why="`model.scratch.num_heads` must be a multiple of `model.scratch.num_kv_heads`, so "
        "that each KV head serves the same number of heads",
        fix=f"--set model.scratch.num_kv_heads={divisor_below(heads, kv_heads)}",
    )
    yield Rule(
        scratch.head_dim % 2,
        f"`model.scratch.head_dim` cannot be {scratch.head_dim}",
        why="rotary embeddings rotate pairs of channels, so it must be even",
        fix=f"--set model.scratch.head_dim={scratch.head_dim + 1}",
    )
    yield Rule(
        scratch.family == "qwen2_5_vl" and heads * scratch.head_dim != scratch.hidden_size,
        f"{heads} heads of {scratch.head_dim} are not `model.scratch.hidden_size`",
        why=f"qwen2_5_vl has no separate head size: the heads divide {scratch.hidden_size}",
        fix=f"--set model.scratch.hidden_size={heads * scratch.head_dim}",
    )
    yield Rule(
        size < MIN_VOCAB_SIZE,
        f"`model.scratch.vocab_size` cannot be {size}",
        why="a byte-level vocabulary contains 256 bytes and the special tokens of the chat "
        f"template, at least {MIN_VOCAB_SIZE}",
        fix="--set model.scratch.vocab_size=512",
    )
    yield Rule(
        recipe.learns_from_rows and longest > positions,
        "the longest row exceeds the model's positions",
        why=f"`data.max_row_tokens` is {longest}; the model has {positions} positions",
        fix=[
            f"--set data.max_row_tokens={positions}",
            f"--set model.scratch.max_position_embeddings={longest}",
        ],
    )
    yield Rule(
        longest > positions,
        "prompt and response exceed the model's positions",
        why=f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + rollout.max_response_tokens "
        f"{recipe.rollout.max_response_tokens} = {longest}; the model has {positions} positions",
        fix=f"--set model.scratch.max_position_embeddings={longest}",
    )


def _expert_rules(scratch: ScratchModel) -> Iterator[Rule]:
    is_moe, experts = scratch.family == "qwen3_moe", scratch.num_experts
    yield Rule(
        is_moe and experts < 2,
        "a mixture of experts needs experts",
        why=f"`model.scratch.family` is qwen3_moe and `num_experts` is {experts}",
        fix=[
            "--set model.scratch.num_experts=8"
            + " --set model.scratch.tie_embeddings=false" * scratch.tie_embeddings,
            "--set model.scratch.family=qwen3",
        ],
    )
    yield Rule(
        not is_moe and experts,
        "a dense model has no experts",
        why=f"`model.scratch.family` is {scratch.family}, but `num_experts` is {experts}",
        fix=[
            "--set model.scratch.family=qwen3_moe --set model.scratch.tie_embeddings=false",
            "--set model.scratch.num_experts=0",
        ],
    )
    yield Rule(
        is_moe and scratch.tie_embeddings,
        "a mixture of experts cannot tie its embeddings here",
        why="SGLang does not load the output layer of a `qwen3_moe` model with tied embeddings, "
        "so it would sample at random",
        fix="--set model.scratch.tie_embeddings=false",
    )
    yield Rule(
        is_moe and scratch.topk > experts,
        f"a token cannot use {scratch.topk} of {experts} experts",
        why="`model.scratch.topk` is larger than `model.scratch.num_experts`",
        fix=f"--set model.scratch.topk={experts}",
    )
