"""Hyper-connections (DeepSeek-V4's report, section 2.2; arXiv 2512.24880): a layer has n parallel
residual streams, reads a weighted sum of them and mixes its output back. Between layers and between
pipeline stages, the streams of a position are concatenated in Megatron's hidden states, [S, 1, n *
hidden_size]. Used by the layers of families that have them, and by `model`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from milescli.models.facts import ModelFacts


class _Mixer(torch.nn.Module):
    """Holds the projection of the normalised streams to weights, in float32."""

    def __init__(self, config, facts: ModelFacts, *, outputs: int, scales: int) -> None:
        """`outputs`: weights per position; `scales`: numbers that multiply groups of them."""
        super().__init__()
        assert facts.hyper is not None, facts.family
        self.sizes, self.norm_eps = facts.hyper, facts.norm_eps
        made = {"dtype": torch.float32, "device": torch.cuda.current_device()}
        inputs = self.sizes.num_streams * facts.hidden_size
        self.fn = torch.nn.Parameter(torch.zeros(outputs, inputs, **made))
        self.base = torch.nn.Parameter(torch.zeros(outputs, **made))
        self.scale = torch.nn.Parameter(torch.ones(scales, **made))
        for parameter in self.parameters():
            # tp ranks hold different positions, so the gradients are summed
            parameter.sequence_parallel = config.sequence_parallel

    def _weights(self, streams: torch.Tensor) -> torch.Tensor:
        """Return [S, 1, outputs] float32 of [S, 1, n * hidden]. The norm has no weight, so it can
        follow the projection."""
        wide = streams.float()
        size = (wide.square().mean(dim=-1, keepdim=True) + self.norm_eps).rsqrt()
        return F.linear(wide, self.fn) * size

    def _sum(self, weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Sum the streams with `weights` [S, 1, n] -> [S, 1, hidden]."""
        split = streams.unflatten(-1, (self.sizes.num_streams, -1))
        return (weights[..., None] * split).sum(dim=-2).to(streams.dtype)


class HyperConnection(_Mixer):
    """Connects one part of a layer (attention or MLP) to the streams."""

    def __init__(self, config, facts: ModelFacts) -> None:
        assert facts.hyper is not None, facts.family
        n = facts.hyper.num_streams
        super().__init__(config, facts, outputs=(2 + n) * n, scales=3)

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the part's input [S, 1, hidden], and for `put` the weights of its output on each
        stream [S, 1, n] and the matrix that mixes the streams [S, 1, n, n]."""
        n = self.sizes.num_streams
        shares, eps = [n, n, n * n], self.sizes.eps
        taken, given, mixed = (
            part * scale + base
            for part, scale, base in zip(
                self._weights(streams).split(shares, dim=-1),
                self.scale,
                self.base.split(shares),
                strict=True,
            )
        )
        collapsed = self._sum(torch.sigmoid(taken) + eps, streams)
        return collapsed, 2 * torch.sigmoid(given), self._balanced(mixed.unflatten(-1, (n, n)))

    def _balanced(self, logits: torch.Tensor) -> torch.Tensor:
        """Return matrices [S, 1, n, n] whose rows and columns sum to about 1 (Sinkhorn and Knopp,
        1967)."""
        eps = self.sizes.eps
        mixing = torch.softmax(logits, dim=-1) + eps
        mixing = mixing / (mixing.sum(dim=-2, keepdim=True) + eps)
        for _ in range(self.sizes.sinkhorn_rounds - 1):
            mixing = mixing / (mixing.sum(dim=-1, keepdim=True) + eps)
            mixing = mixing / (mixing.sum(dim=-2, keepdim=True) + eps)
        return mixing


def put(
    output: torch.Tensor, given: torch.Tensor, mixing: torch.Tensor, *, streams: torch.Tensor
) -> torch.Tensor:
    """Return the streams after a part of the layer, from its output [S, 1, hidden] and the two
    tensors that HyperConnection returned for `put`."""
    n, dtype = given.shape[-1], streams.dtype
    kept = mixing.to(dtype).transpose(-1, -2) @ streams.unflatten(-1, (n, -1))
    return (given.to(dtype)[..., None] * output[..., None, :] + kept).flatten(-2)


class HyperHead(_Mixer):
    """Sums the streams before the final norm."""

    def __init__(self, config, facts: ModelFacts) -> None:
        assert facts.hyper is not None, facts.family
        super().__init__(config, facts, outputs=facts.hyper.num_streams, scales=1)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the streams, [S, 1, n * hidden] -> [S, 1, hidden]."""
        weights = torch.sigmoid(self._weights(streams) * self.scale + self.base) + self.sizes.eps
        return self._sum(weights, streams)


class HyperLayer(TransformerLayer):
    """Implements Megatron's layer with hyper-connections in place of its two residual sums."""

    def __init__(self, config, submodules, *args, facts: ModelFacts, layer: int, **options) -> None:
        """Called by Megatron. `layer` counts from 0 over all stages; layer 0 gets the embedding and
        copies it to all streams."""
        super().__init__(config, submodules, *args, **options)
        assert facts.hyper is not None, facts.family
        self._copies = facts.hyper.num_streams if layer == 0 else 1
        self.self_attention_hyper_connection = HyperConnection(config, facts)
        self.mlp_hyper_connection = HyperConnection(config, facts)

    def forward(self, hidden_states, attention_mask=None, context=None, **options):
        """Return the streams [S, 1, n * hidden_size] and `context`. Called by Megatron."""
        row, streams = options["packed_seq_params"], hidden_states.repeat(1, 1, self._copies)
        collapsed, *rest = self.self_attention_hyper_connection(streams)
        output, _ = self.self_attention(
            self.input_layernorm(collapsed), attention_mask, packed_seq_params=row
        )
        streams = put(output, *rest, streams=streams)
        collapsed, *rest = self.mlp_hyper_connection(streams)
        output, _ = self.mlp(self.pre_mlp_layernorm(collapsed))
        return put(output, *rest, streams=streams), context


def add_head(block: TransformerBlock, facts: ModelFacts) -> None:
    """Make the last stage's block sum its streams before its final norm. It keeps the streams in
    `streams` for an MTP layer that is trained."""
    block.hyper_head = HyperHead(block.config, facts)

    def sum_streams(_, inputs):
        if facts.trains_mtp:
            block.streams = inputs[0]
        return block.hyper_head(inputs[0]), *inputs[1:]

    block.final_layernorm.register_forward_pre_hook(sum_streams)
