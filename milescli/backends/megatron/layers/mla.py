"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over packed rows: Megatron's own
module and names, rotated by this package's angles. The projections down to the latents are small,
so every rank of tensor parallelism holds them whole. Used by `model`, `specs`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention as stock
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from milescli.backends.megatron.layers import dsa
from milescli.backends.megatron.layers.attention import Grid, PackedAttention, PackedRow
from milescli.backends.megatron.layers.norm import RmsNorm
from milescli.backends.megatron.layers.rope import rotate
from milescli.models.facts import ModelFacts


def config_class(facts: ModelFacts) -> type[TransformerConfig]:
    """Return the class of Megatron's config that has the settings of `options`."""
    return MLATransformerConfig if facts.mla else TransformerConfig


def options(facts: ModelFacts) -> dict[str, object]:
    """Return Megatron's settings of latent attention; empty for a model without it."""
    if facts.mla is None:
        return {}
    assert facts.rope is not None
    scaling = facts.rope.scaling
    settings: dict[str, object] = {
        "q_lora_rank": facts.mla.q_lora_rank or None,
        "kv_lora_rank": facts.mla.kv_lora_rank,
        "qk_head_dim": facts.mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": facts.mla.qk_rope_head_dim,
        "v_head_dim": facts.mla.v_head_dim,
        # the latents' norms come from the spec; given them, Megatron would sum the gradient of
        # q_layernorm over tp ranks that agree on it
        "qk_layernorm": False,
        "rope_type": "yarn" if scaling and scaling.kind == "yarn" else "rope",
        "rotary_base": facts.rope.theta,
        # of these two, Megatron makes the scale of the softmax
        "rotary_scaling_factor": scaling.factor if scaling else 1.0,
        "mscale_all_dim": (scaling.mscale_all_dim or 0.0) if scaling else 0.0,
    }
    if scaling and scaling.kind == "yarn":
        settings["original_max_position_embeddings"] = scaling.original_max_positions
        settings["beta_fast"], settings["beta_slow"] = scaling.beta_fast, scaling.beta_slow
        settings["mscale"] = scaling.mscale or 1.0
    return settings | dsa.options(facts)


def adapt(spec: ModuleSpec, facts: ModelFacts, *, layer: int) -> None:
    """Put latent attention into Megatron's spec of layer `layer` (from 0)."""
    attention = get_gpt_layer_local_spec(
        qk_layernorm=True, multi_latent_attention=True, normalization="RMSNorm"
    )
    spec.submodules.self_attention = attention.submodules.self_attention
    spec.submodules.self_attention.module = LatentAttention
    spec.submodules.self_attention.params["facts"] = facts
    # norms lie in checkpoints under their own names: Megatron fuses none with latent attention
    spec.submodules.sharded_state_dict_keys_map = attention.submodules.sharded_state_dict_keys_map
    parts = spec.submodules.self_attention.submodules
    parts.linear_q_down_proj = parts.linear_kv_down_proj = Linear
    parts.q_layernorm = parts.kv_layernorm = RmsNorm
    parts.core_attention = dsa.core_attention(facts, layer=layer) or ModuleSpec(
        module=CoreAttention, params={"kind": "mla"}
    )


class _Replicated(Linear):
    """Looks like Megatron's parallel layers in checkpoints: it has an empty extra state."""

    def get_extra_state(self) -> None:
        """Return None: there is no extra state."""

    def set_extra_state(self, state: object) -> None:
        """Ignore the empty extra state."""


class LatentAttention(stock.MLASelfAttention):
    """Replaces the computation of queries, keys and values in Megatron's module: for packed rows
    under context parallelism, for every rotary embedding of `layers.rope`, and with the gradient of
    the shared rotated key summed over the heads of all ranks."""

    def __init__(self, *args, facts: ModelFacts, **options) -> None:
        """Called by Megatron."""
        if not isinstance(stock.TELinear, type):
            # Megatron takes TransformerEngine for installed wherever its own wrapper can be
            # imported
            stock.HAVE_TE = False
        super().__init__(*args, **options)
        assert facts.mla is not None
        self.sizes = facts.mla
        self.kv_layernorm.eps = facts.mla.norm_eps
        # Megatron builds but the classes that it knows by name
        self.linear_kv_down_proj.__class__ = _Replicated
        if facts.mla.q_lora_rank:
            self.q_layernorm.eps = facts.mla.norm_eps
            self.linear_q_down_proj.__class__ = _Replicated

    def get_query_key_value_tensors(
        self,
        hidden_states,
        key_value_states=None,
        position_ids=None,
        packed_seq_params=None,
        inference_context=None,
        **_,
    ):
        """Return query, key [S, heads, nope + rope] and value [S, heads, v] of all heads of this
        rank, and both latents unchanged. hidden_states is [S, 1, hidden], or this rank's part of S
        under sequence parallelism. Called by Megatron."""
        row, sizes = packed_seq_params, self.sizes
        assert isinstance(row, PackedRow), "this attention computes packed rows only"
        angles = row.angles["mla"]
        query, latent_q = self._query(hidden_states)
        query_plain, query_turned = query.split(
            [sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1
        )
        down, _ = self.linear_kv_down_proj(hidden_states)
        latent_kv, key_turned = down.split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        latent_kv = self.kv_layernorm(latent_kv)
        up, _ = self.linear_kv_up_proj(latent_kv)
        up = up.squeeze(1).unflatten(-1, (-1, sizes.qk_nope_head_dim + sizes.v_head_dim))
        key_plain, value = up.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        key_turned = rotate(self._for_all_heads(key_turned).squeeze(1).unsqueeze(1), angles)
        query = torch.cat([query_plain, rotate(query_turned, angles)], dim=-1)
        key = torch.cat([key_plain, key_turned.expand(-1, key_plain.shape[1], -1)], dim=-1)
        return query, key, value.contiguous(), latent_q, latent_kv

    def _query(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [S, heads, nope + rope], and the latent that the indexer uses."""
        if not self.sizes.q_lora_rank:
            query, _ = self.linear_q_proj(hidden_states)
            latent = hidden_states
        else:
            down, _ = self.linear_q_down_proj(hidden_states)
            latent = self.q_layernorm(down)
            query, _ = self.linear_q_up_proj(latent)
        return query.squeeze(1).unflatten(-1, (-1, self.q_head_dim)), latent

    def _for_all_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of the key that all heads share, for every position; its gradient is
        summed over the ranks that share the heads."""
        if self.tp_group.size() == 1:
            return x
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(x, group=self.tp_group)


class CoreAttention(PackedAttention):
    """Pads values, which are usually narrower than keys, with zeros, so that PyTorch's fast kernel
    applies."""

    def _attend(self, query, key, value, *, grid: Grid) -> torch.Tensor:
        narrow = query.shape[-1] - value.shape[-1]
        if narrow <= 0:
            return super()._attend(query, key, value, grid=grid)
        return super()._attend(query, key, F.pad(value, (0, narrow)), grid=grid)[
            ..., : value.shape[-1]
        ]
