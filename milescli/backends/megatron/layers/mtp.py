"""The multi-token-prediction layer (arXiv 2412.19437, section 2.2) in training: Megatron's own
module and names, over packed rows, with its gradient detached from the model below; and that of
models with hyper-connections. Used by `model`."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, checkpoint
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from milescli.backends.megatron.layers.experts import Projection
from milescli.backends.megatron.layers.hyper import HyperHead
from milescli.models.facts import ModelFacts

PREFIX = "mtp."
"""Prefix of its weights' names."""


def options(facts: ModelFacts) -> dict[str, object]:
    """Return Megatron's settings of a trained MTP layer; empty for a model without one."""
    return {"mtp_num_layers": facts.num_mtp_layers} if facts.trains_mtp else {}


def block_spec(
    layer: ModuleSpec, facts: ModelFacts, *, norm: type, trains_trunk: bool
) -> MultiTokenPredictionBlockSubmodules:
    """Return the spec of the MTP block around the decoder layer `layer`. `trains_trunk`: its
    gradient reaches the model below."""
    own = {} if facts.hyper is None else {"facts": facts}
    return MultiTokenPredictionBlockSubmodules(
        layer_specs=[
            ModuleSpec(
                module=HyperMtpLayer if own else MtpLayer,
                params={"trains_trunk": trains_trunk, **own},
                submodules=MultiTokenPredictionLayerSubmodules(
                    enorm=norm,
                    hnorm=norm,
                    eh_proj=ColumnParallelLinear,
                    transformer_layer=layer,
                    layer_norm=norm,
                ),
            )
        ]
    )


class MtpLayer(MultiTokenPredictionLayer):
    """Gets the token after each input token as an argument, instead of shifting the row by one,
    which would need communication at every border of a context-parallel part."""

    def __init__(self, *args, trains_trunk: bool, **options) -> None:
        """Called by Megatron."""
        super().__init__(*args, **options)
        self.trains_trunk = trains_trunk

    def _get_embeddings(
        self, input_ids, position_ids, embedding, hidden_states, packed_seq_params=None
    ):
        """Return the embeddings of input_ids [1, S], the following tokens, with hidden_states [S,
        1, hidden], or this rank's part of S under sequence parallelism. Called by Megatron."""
        with nullcontext() if self.trains_trunk else torch.no_grad():
            embedded = embedding(input_ids=input_ids, position_ids=position_ids)
        if not self.trains_trunk:
            # Megatron's recomputation gives gradients where an input wants one
            embedded, hidden_states = (
                part.detach().requires_grad_() for part in (embedded, hidden_states)
            )
        return input_ids, position_ids, embedded, hidden_states

    def _checkpointed_forward(self, forward_func, *, hidden_states, decoder_input, **rest):
        """Recompute the layer in the backward pass. Megatron's own version passes all arguments to
        autograd, and a row is not a tensor. Called by Megatron."""

        def forward(hidden_states, decoder_input):
            return forward_func(hidden_states=hidden_states, decoder_input=decoder_input, **rest)

        return checkpoint(forward, False, hidden_states, decoder_input)


class HyperMtpLayer(MtpLayer):
    """Implements the layer of DeepSeek-V4: it gets all residual streams of the model below, adds
    the embedding to each, and sums its own streams with its own head."""

    def __init__(self, config, *args, facts: ModelFacts, **options) -> None:
        """Called by Megatron."""
        super().__init__(config, *args, **options)
        del self.eh_proj
        size = facts.hidden_size
        self.e_proj, self.h_proj = (Projection(size, size, config=config) for _ in range(2))
        self.hyper_head = HyperHead(config, facts)

    def _concat_embeddings(self, hidden_states, decoder_input):
        """Return [S, 1, n * hidden] of the streams [S, 1, n * hidden] and embeddings [S, 1,
        hidden]. Called by Megatron."""
        streams = hidden_states.unflatten(-1, (-1, decoder_input.shape[-1]))
        embedded, _ = self.e_proj(self.enorm(decoder_input))
        own, _ = self.h_proj(self.hnorm(streams))
        return (embedded[..., None, :] + own).flatten(-2)

    def _postprocess(self, hidden_states):
        """Return [S, 1, hidden] of the streams [S, 1, n * hidden]. Called by Megatron."""
        return super()._postprocess(self.hyper_head(hidden_states))


class GptWithMtp(GPTModel):
    """Also returns the MTP layer's input of the output layer, if it gets the following tokens."""

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *args, **options):
        """Return the input of the output layer [1, S, hidden], for hidden_states [S, 1, hidden]
        after the last norm; on the last stage with labels also the same for the token after next.
        labels [1, S]: the token after each input token, or None. Called by Megatron."""
        if not self.post_process:
            return hidden_states
        below = self.decoder.__dict__.pop("streams", hidden_states)
        given, _ = self.output_layer(hidden_states)
        given = given.transpose(0, 1).contiguous()
        if labels is None:
            return given
        (layer,) = self.mtp.layers
        ahead, _, _ = layer(
            input_ids=labels,
            position_ids=position_ids,
            hidden_states=below,
            attention_mask=None,
            packed_seq_params=options["packed_seq_params"],
            embedding=self.embedding,
        )
        further, _ = self.output_layer(ahead)
        return given, further.transpose(0, 1).contiguous()
