"""Megatron's MambaModel, for models whose layers have one part each (Nemotron-H): its layer stack
with the parts of this package, any split into pipeline stages, and recomputation, which Megatron's
own stack lacks. Called by `model`."""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import make_viewless_tensor

from milescli.backends.megatron.architecture.specs import layer_spec
from milescli.backends.megatron.layers import mamba
from milescli.backends.megatron.layers.experts import LatentExperts
from milescli.backends.megatron.layers.norm import RmsNorm
from milescli.backends.megatron.mesh import Mesh
from milescli.models.facts import ModelFacts


def build_hybrid(
    config: TransformerConfig, facts: ModelFacts, mesh: Mesh, *, vocab_size: int
) -> MambaModel:
    """Build this rank's part of the model; its weights are undefined until they are loaded.
    `vocab_size`: padded."""
    return MambaModel(
        config=config,
        mamba_stack_spec=ModuleSpec(module=HybridStack, params={"facts": facts}),
        vocab_size=vocab_size,
        max_sequence_length=facts.max_position_embeddings,
        pre_process=mesh.is_first_stage,
        post_process=mesh.is_last_stage,
        share_embeddings_and_output_weights=facts.tied_embeddings,
        position_embedding_type="none",
        parallel_output=True,
    )


def part_spec(config: TransformerConfig, facts: ModelFacts, *, layer: int) -> ModuleSpec:
    """Return the spec of layer `layer` (from 0): Mamba-2, or Megatron's layer with either attention
    or MLP."""
    kind = facts.layers[layer]
    if kind.mixer == "mamba":
        assert facts.mamba is not None
        return mamba.layer_spec(config, facts.mamba)
    spec = layer_spec(config, facts, layer=layer, engine=False)
    parts = spec.submodules
    if kind.mixer == "none":
        parts.input_layernorm, parts.self_attention, parts.self_attn_bda = (
            IdentityOp,
            IdentityOp,
            IdentityFuncOp,
        )
    if kind.mlp == "none":
        parts.pre_mlp_layernorm, parts.mlp, parts.mlp_bda = IdentityOp, IdentityOp, IdentityFuncOp
    if kind.mlp == "moe":
        # MambaModel's checkpoints have the norm before experts under its own name
        parts.sharded_state_dict_keys_map = {}
        if facts.moe_latent_size:
            parts.mlp.module = LatentExperts
    return spec


class HybridStack(MambaStack):
    """Builds and runs the layers of this pipeline stage."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        facts: ModelFacts,
        pre_process: bool,
        post_process: bool,
        pg_collection,
        **_: object,
    ) -> None:
        """Initialise for MambaModel, which calls this. Skips Megatron's own __init__, which needs
        TransformerEngine and stages of equal size."""
        MegatronModule.__init__(self, config=config)
        self.pre_process, self.post_process = pre_process, post_process
        self.tp_group, self.pp_group = pg_collection.tp, pg_collection.pp
        self.input_tensor: torch.Tensor | None = None
        first = get_transformer_layer_offset(config)
        self.layers = torch.nn.ModuleList(
            self._build(
                config, facts, layer=first + index, first=first, pg_collection=pg_collection
            )
            for index in range(get_num_layers_to_build(config))
        )
        if post_process:
            self.final_norm = RmsNorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    @staticmethod
    def _build(
        config: TransformerConfig, facts: ModelFacts, *, layer: int, first: int, pg_collection
    ) -> torch.nn.Module:
        is_mamba = facts.layers[layer].mixer == "mamba"
        # Megatron's other layers add the number of the stage's first one themselves
        number = layer + 1 if is_mamba else layer + 1 - first
        spec = part_spec(config, facts, layer=layer)
        return build_module(spec, config=config, layer_number=number, pg_collection=pg_collection)

    def forward(
        self, hidden_states, attention_mask, *, packed_seq_params, **_: object
    ) -> torch.Tensor:
        """Run the layers; MambaModel calls this. `hidden_states` is [S (/ tp), 1, hidden_size], or
        None after the first stage."""
        if not self.pre_process:
            hidden_states = self.input_tensor

        def run(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
            out = layer(
                hidden_states=hidden,
                attention_mask=attention_mask,
                packed_seq_params=packed_seq_params,
            )
            return out[0] if isinstance(out, tuple) else out

        recompute = self.config.recompute_granularity == "full" and self.training
        for layer in self.layers:
            if recompute:
                hidden_states = tensor_parallel.checkpoint(
                    lambda hidden, layer=layer: run(layer, hidden), False, hidden_states
                )
            else:
                hidden_states = run(layer, hidden_states)
        if self.post_process:
            hidden_states = self.final_norm(hidden_states)
        return make_viewless_tensor(
            hidden_states, requires_grad=hidden_states.requires_grad, keep_graph=True
        )
