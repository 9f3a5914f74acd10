"""What a recipe can say of the model that is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from milescli.recipe.section import NonNegative, Positive, PositiveFloat, Section


class ScratchModel(Section):
    """A small model made here from a seed, instead of one that is downloaded."""

    family: Literal["qwen3", "qwen3_moe"] = "qwen3"
    hidden_size: Positive = 128
    num_layers: Annotated[int, Field(ge=1, le=1000)] = 4
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    head_dim: Positive = 32
    ffn_hidden_size: Positive = 384
    num_experts: NonNegative = 0
    """0 for a dense model; needs `family: qwen3_moe` otherwise."""
    topk: Positive = 2
    """Experts per token."""
    moe_ffn_hidden_size: Positive = 128
    vocab_size: Positive = 512
    """Size of the byte-level BPE vocabulary, trained here on the task's own text."""
    vocabulary: str | None = None
    """File or `task:NAME` whose text that is, so that two models have the same tokens; null: the
    first that `data` names."""
    tie_embeddings: bool = True
    rope_theta: PositiveFloat = 10_000.0
    max_position_embeddings: Positive = 4096


class Model(Section):
    """Which weights are trained."""

    path: str | None = None
    """A Hugging Face folder or hub name; or another run, whose newest checkpoint is begun with, or
    `RUN/checkpoints/step_N`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    scratch: ScratchModel | None = None
    """Make a small model instead. Exactly one of `path` and `scratch` is given."""
    adapter: str | None = None
    """A PEFT folder (safetensors) of a plain LoRA adapter over this model, which `train.lora`
    begins with; null: a new one."""
    layer_spec: str = "default"
    """What the trainer's layers are made of: default, or an import path to a function that changes
    Megatron's spec of a layer. The engines know nothing of it."""
    allow_unproven: bool = False
    """Train a family that no independent implementation could be compared with (`miles models`
    names them)."""
