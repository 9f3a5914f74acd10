"""Builds GPTModel of Megatron-Core from ModelFacts and a layout. Uses TransformerEngine's layers
where it is installed beside an accelerator, else Megatron's own layers with the attention and norm
of this package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from milescli.backends.megatron.architecture.hybrid import build_hybrid
from milescli.backends.megatron.architecture.specs import engine_knows, final_norm, layer_spec
from milescli.backends.megatron.architecture.vision import VisionGpt
from milescli.backends.megatron.cpu.swiglu import is_plain
from milescli.backends.megatron.layer_specs import apply_to_spec, unchanged
from milescli.backends.megatron.layers import (
    attention,
    compressed,
    experts,
    gated_delta,
    gemma4,
    hyper,
    mamba,
    mla,
    mtp,
)
from milescli.backends.megatron.layers.heads import HiddenLayer, ScaledEmbeddings, ScoreLayer
from milescli.backends.megatron.mesh import Mesh
from milescli.models.facts import ModelFacts
from milescli.models.mtp import with_mtp_last
from milescli.plan.legal import is_even, stage_sizes
from milescli.plan.types import TrainerLayout
from milescli.platform import cpu_kernels
from milescli.train.vocab_parallel import Head, VocabShard


def uses_engine(facts: ModelFacts, device: torch.device) -> bool:
    """Return True if TransformerEngine's layers are installed and can compute this model."""
    return (
        device.type != "cpu"
        and importlib.util.find_spec("transformer_engine") is not None
        and engine_knows(facts)
    )


def padded_vocab_size(facts: ModelFacts, layout: TrainerLayout) -> int:
    """Return the rows of embedding and output layer over all ranks: the vocabulary, padded to a
    multiple of tp."""
    return -(-facts.vocab_size // layout.tp) * layout.tp


def build_config(
    facts: ModelFacts,
    layout: TrainerLayout,
    *,
    dtype: torch.dtype,
    device: torch.device,
    recompute: str,
    routing_replay: bool,
    engine: bool | None = None,
) -> TransformerConfig:
    """Return Megatron's config. `engine`: use TransformerEngine's layers; None: if `uses_engine` is
    True."""
    engine = uses_engine(facts, device) if engine is None else engine
    options: dict[str, object] = {
        "num_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "num_attention_heads": facts.num_heads,
        "num_query_groups": facts.num_kv_heads,
        "kv_channels": facts.head_dim,
        "ffn_hidden_size": facts.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": facts.norm_eps,
        "add_qkv_bias": facts.qkv_bias,
        # Megatron sums these norms' gradients over ranks, where those over heads hold parts
        "qk_layernorm": facts.qk_norm and not facts.qk_norm_over_heads,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
    }
    options |= experts.mlp_options(facts)
    options |= attention.options(facts)
    options |= gemma4.options(facts)
    options |= compressed.options(facts)
    options |= mla.options(facts)
    options |= gated_delta.options(facts, cp=layout.cp)
    options |= mamba.options(facts)
    options |= mtp.options(facts)
    if facts.norm_zero_centered:
        options["layernorm_zero_centered_gamma"] = True
    options |= _layout_options(facts, layout, dtype=dtype, device=device)
    if recompute == "full":
        options |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if facts.num_experts:
        options |= experts.options(facts, routing_replay=routing_replay, grouped=engine)
    # Megatron refuses biases of experts under etp, as it would add them once per rank;
    # `layers.experts` adds each rank's share
    config = mla.config_class(facts)(
        **{**options, "add_bias_linear": options["add_bias_linear"] and layout.etp == 1}
    )
    config.add_bias_linear = options["add_bias_linear"]
    if device.type == "cpu":
        config.bias_activation_fusion = is_plain(config) and cpu_kernels.is_available()
    return config


def _layout_options(
    facts: ModelFacts, layout: TrainerLayout, *, dtype: torch.dtype, device: torch.device
) -> dict[str, object]:
    on_host = device.type == "cpu"
    options: dict[str, object] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel and layout.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": on_host,
        "perform_initialization": False,
        "variable_seq_lengths": layout.pp > 1,
        "batch_p2p_comm": not on_host,
        # also without experts: Megatron checks it against variable_seq_lengths
        "moe_token_dispatcher_type": "alltoall",
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
    }
    sizes = stage_sizes(layout, facts.num_layers)
    if not is_even(sizes):
        options["pipeline_model_parallel_layout"] = _uneven_stages(sizes, facts)
    return options


def _uneven_stages(sizes: tuple[int, ...], facts: ModelFacts) -> list[list[str]]:
    """Return an uneven split into stages as Megatron's config describes it."""
    stages = [["decoder"] * size for size in sizes]
    stages[0].insert(0, "embedding")
    stages[-1] += ["mtp"] * (facts.num_mtp_layers * facts.trains_mtp)
    stages[-1].append("loss")
    return stages


def build_model(
    config: TransformerConfig,
    facts: ModelFacts,
    mesh: Mesh,
    *,
    engine: bool | None = None,
    change_layer: Callable[..., Any] = unchanged,
    mtp_trains_trunk: bool = False,
) -> GPTModel:
    """Build this rank's part of the model; its weights are undefined until they are loaded. The
    last stage returns scores, or the input of its output layer (see `head`). `engine`: as in
    `build_config`; `change_layer`: as in `layer_specs`, except that layers of a hybrid model have
    no spec of their own; `mtp_trains_trunk`: as in `layers.mtp`, for an MTP layer after the last
    one."""
    engine = uses_engine(facts, mesh.device) if engine is None else engine
    # replay instances register themselves in a list of the process; those of an earlier model would
    # be filled instead
    RouterReplay.clear_global_router_replay_instances()
    if facts.mamba is not None:
        hybrid = build_hybrid(config, facts, mesh, vocab_size=padded_vocab_size(facts, mesh.layout))
        return _with_head(hybrid, facts, mesh)

    def layer_of(number: int, facts: ModelFacts = facts) -> ModuleSpec:
        spec = layer_spec(config, facts, layer=number, engine=engine)
        return apply_to_spec(change_layer, spec=spec, config=config, facts=facts, layer=number)

    first = get_transformer_layer_offset(config)
    layers = [layer_of(first + index) for index in range(get_num_layers_to_build(config))]
    spec = TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm(engine=engine))
    made: Callable[..., GPTModel] = GPTModel
    if facts.vision is not None and mesh.is_first_stage:
        made = partial(VisionGpt, vision=facts.vision, scale=facts.embedding_scale)
    elif facts.embedding_scale is not None:
        made = partial(ScaledEmbeddings, scale=facts.embedding_scale)
    elif facts.trains_mtp:
        made = mtp.GptWithMtp
    of_mtp = None
    if facts.trains_mtp and mesh.is_last_stage:
        of_mtp = mtp.block_spec(
            layer_of(facts.num_layers, with_mtp_last(facts)),
            facts,
            norm=final_norm(engine=engine),
            trains_trunk=mtp_trains_trunk,
        )
    model = made(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(facts, mesh.layout),
        max_sequence_length=facts.max_position_embeddings,
        pre_process=mesh.is_first_stage,
        post_process=mesh.is_last_stage,
        share_embeddings_and_output_weights=facts.tied_embeddings,
        # without TransformerEngine the attention of this package rotates by itself
        position_embedding_type="rope" if engine else "none",
        rotary_base=facts.rope.theta if facts.rope else 10_000,
        parallel_output=True,
        mtp_block_spec=of_mtp,
    )
    return _with_head(model, facts, mesh)


def _with_head(model: GPTModel, facts: ModelFacts, mesh: Mesh) -> GPTModel:
    """Return the model with the head that it needs, on its device."""
    if mesh.is_last_stage and facts.hyper is not None:
        hyper.add_head(model.decoder, facts)
    if mesh.is_last_stage and facts.scores:
        model.output_layer = ScoreLayer(model.config)
    elif mesh.is_last_stage:
        # the layer is Megatron's own in all but its forward pass
        model.output_layer.__class__ = HiddenLayer
    for name, parameter in model.named_parameters():
        if name.startswith(mtp.PREFIX) or ".indexer." in name:
            # Megatron's word for what the norm of all gradients leaves out: the steps of the model
            # are those that it would make without the MTP layer, or the loss of the indexers
            parameter.shared = True
    return model if mesh.device.type == "cpu" else model.to(mesh.device)


def head(
    model: GPTModel, hidden: torch.Tensor, *, facts: ModelFacts, vocab_size: int, mesh: Mesh
) -> Head:
    """Return the output layer with its input `hidden` [T, hidden_size], for a model on the last
    stage that gives no scores. Rows beyond `vocab_size` are padding."""
    weight = model.output_layer.weight
    if weight is None:
        weight = model.shared_embedding_or_output_weight()
    start = len(weight) * mesh.tp_rank
    shard = VocabShard(
        start=start,
        size=max(min(vocab_size - start, len(weight)), 0),
        group=mesh.tp_group if mesh.layout.tp > 1 else None,
    )
    return Head(hidden=hidden, weight=weight, shard=shard, cap=facts.logit_softcap)
