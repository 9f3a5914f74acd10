"""Megatron's gated delta net over packed rows: its modules, names and checkpoint, with the
recurrence in plain PyTorch and context parallelism. Gives Megatron's settings, and the module that
`specs` puts in place of attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from milescli.backends.megatron.layers.attention import PackedRow
from milescli.backends.megatron.layers.norm import RmsNorm
from milescli.models.facts import ModelFacts

Chunked = torch.Tensor
"""[chunks, T, ...], the chunks in the order of `Chunks`."""


def gated_delta_rule(
    query: Chunked,
    key: Chunked,
    value: Chunked,
    decay: Chunked,
    beta: Chunked,
    *,
    per_step: Sequence[int],
) -> Chunked:
    """Compute S_t = exp(decay_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T, o_t = S_t^T q_t
    (arXiv 2412.06464, eq. 10) chunk by chunk (section 3.3): a triangular system within a chunk, the
    state S between chunks.

    query and key are [chunks, T, key heads, dk], value [chunks, T, value heads, dv], decay (<= 0)
    and beta [chunks, T, value heads], all float32; value heads share key heads in order. Returns
    [chunks, T, value heads, dv].
    """
    num_keys, num_values = key.shape[2], value.shape[2]
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    # [chunks, key heads, value heads per key head, T, ...]
    value, decay, beta = (
        x.unflatten(2, (num_keys, num_values // num_keys)).movedim(1, 3)
        for x in (value, decay, beta)
    )
    until = decay.cumsum(dim=-1)
    above = torch.ones(
        until.shape[-1], until.shape[-1], dtype=torch.bool, device=until.device
    ).triu(1)
    between = (until[..., :, None] - until[..., None, :]).masked_fill(above, -torch.inf).exp()
    from_start = until.exp()[..., None]
    overlap = (key @ key.transpose(-1, -2))[:, :, None] * between * beta[..., None]
    # the diagonal of the system is 1, whatever `overlap` has there
    sides = torch.cat(
        (value * beta[..., None], key[:, :, None] * (beta[..., None] * from_start)), dim=-1
    )
    solved = torch.linalg.solve_triangular(overlap, sides, upper=False, unitriangular=True)
    within = (query @ key.transpose(-1, -2))[:, :, None] * between
    news, reads = _between_chunks(
        solved.split((value.shape[-1], key.shape[-1]), dim=-1),
        query=query[:, :, None] * from_start,
        key=key[:, :, None] * (until[..., -1:] - until).exp()[..., None],
        decayed=from_start[..., -1:, :],
        per_step=per_step,
    )
    return (within @ news + reads).movedim(3, 1).flatten(2, 3)


def _between_chunks(
    solved: Sequence[torch.Tensor],
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    decayed: torch.Tensor,
    per_step: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (what each position adds to the state, what it reads of the state before its chunk),
    both [chunks, ..., T, dv]."""
    added, forgotten = (part.split(per_step) for part in solved)
    query, key, decayed = query.split(per_step), key.split(per_step), decayed.split(per_step)
    news, reads = [added[0]], [torch.zeros_like(added[0])]
    state = None
    for step in range(1, len(per_step)):
        # of the sequences that go on
        going = per_step[step]
        written = key[step - 1][:going].transpose(-1, -2) @ news[-1][:going]
        state = written if state is None else state[:going] * decayed[step - 1][:going] + written
        news.append(added[step] - forgotten[step] @ state)
        reads.append(query[step] @ state)
    return torch.cat(news), torch.cat(reads)


def causal_conv(x: Chunked, weight: torch.Tensor, *, per_step: Sequence[int]) -> Chunked:
    """Convolve each channel with the K - 1 earlier positions of its sequence. x [chunks, T,
    channels], weight [channels, 1, K], K - 1 <= T."""
    width = weight.shape[-1] - 1
    if not width:
        return x * weight[:, 0, 0]
    assert width <= x.shape[1], (width, x.shape)
    ends = x[:, -width:].split(per_step)
    before = [
        torch.zeros_like(ends[0]),
        *(last[:going] for last, going in zip(ends, per_step[1:], strict=False)),
    ]
    return _Conv.apply(torch.cat((torch.cat(before), x), dim=1), weight[:, 0].t())


class _Conv(torch.autograd.Function):
    """Convolves x [chunks, K - 1 + T, channels] with weight [K, channels] -> [chunks, T, channels];
    written out, since autograd would save K copies."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        length = x.shape[1] - len(weight) + 1
        out = x[:, :length] * weight[0]
        for shift in range(1, len(weight)):
            out.addcmul_(x[:, shift : shift + length], weight[shift])
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        length = grad.shape[1]
        grad_x, grad_weight = torch.zeros_like(x), torch.empty_like(weight)
        for shift in range(len(weight)):
            grad_x[:, shift : shift + length].addcmul_(grad, weight[shift])
            grad_weight[shift] = (x[:, shift : shift + length] * grad).sum(dim=(0, 1))
        return grad_x, grad_weight


_TINY = 1e-6
"""Added to the squared length of queries and keys before they are scaled to 1."""


def options(facts: ModelFacts, *, cp: int) -> dict[str, object]:
    """Return Megatron's settings of gated delta layers. Megatron's own module does not support
    context parallelism, and its config refuses it by name."""
    delta = facts.gated_delta
    if delta is None:
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net" if cp == 1 else None,
        "linear_attention_freq": [int(layer.mixer == "gated_delta") for layer in facts.layers],
        "linear_conv_kernel_dim": delta.conv_kernel,
        "linear_key_head_dim": delta.key_head_dim,
        "linear_value_head_dim": delta.value_head_dim,
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
    }


def adapt(layer: TransformerLayerSubmodules, facts: ModelFacts) -> None:
    """Replace attention by the mixer, whose norm is never zero-centered, whatever the config says
    of the other norms."""
    assert facts.gated_delta is not None, facts.family
    wide = facts.gated_delta.float32
    norm = ModuleSpec(
        module=RmsNorm, params={"zero_centered": False, "dtype": torch.float32 if wide else None}
    )
    parts = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=norm, out_proj=RowParallelLinear
    )
    layer.self_attention = ModuleSpec(
        module=PackedGatedDelta, submodules=parts, params={"wide": wide}
    )
    # the norm before it, as checkpoints of Megatron's own module name it
    renamed = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
    layer.sharded_state_dict_keys_map = {**layer.sharded_state_dict_keys_map, **renamed}


class PackedGatedDelta(gated_delta_net.GatedDeltaNet):
    """Implements the gated delta net (arXiv 2412.06464) of Qwen3-Next: hidden states [S / tp or S,
    1, hidden] -> the same shape, and a bias of None."""

    def __init__(
        self,
        config,
        submodules,
        layer_number=None,
        cp_comm_type=None,
        *,
        wide: bool,
        pg_collection=None,
    ) -> None:
        """Called by Megatron. `wide` stores the decay in float32 regardless of the other weights'
        dtype."""
        # it asks for kernels that this class does not use
        gated_delta_net.HAVE_FLA = True
        super().__init__(config, submodules, layer_number=layer_number, pg_collection=pg_collection)
        if wide:
            self.A_log = torch.nn.Parameter(self.A_log.data.float())
        self.cp_group = pg_collection.cp

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask=None,
        *,
        packed_seq_params: PackedRow | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix the tokens of each sequence of the row separately."""
        row = packed_seq_params
        assert isinstance(row, PackedRow), "this mixer computes packed rows only"
        mixed, _ = self.in_proj(hidden_states)
        keys, values, heads = (
            size // self.tp_size for size in (self.qk_dim, self.v_dim, self.num_value_heads)
        )
        query, key, value, gate, beta, alpha = mixed.squeeze(1).split(
            [keys, keys, values, values, heads, heads], dim=-1
        )
        parts = self._to_heads([query, key, value, beta, alpha])
        out = self._mix(*parts, row=row)
        out = self._from_heads(out).unflatten(-1, (-1, self.value_head_dim))
        gated = self._normalise(out) * F.silu(gate.unflatten(-1, (-1, self.value_head_dim)).float())
        return self.out_proj(gated.to(hidden_states.dtype).flatten(1)[:, None])

    def _mix(self, query, key, value, beta, alpha, *, row: PackedRow) -> torch.Tensor:
        """Return [F, value heads * dv] of [F, heads * dim] each, computed in float32."""
        chunks = row.chunks
        assert chunks is not None
        sizes = [part.shape[-1] for part in (query, key, value)]
        decay = -self._own(self.A_log).float().exp() * F.softplus(
            alpha.float() + self._own(self.dt_bias).float()
        )
        qkv = chunks.cells.fill(torch.cat((query, key, value), dim=-1)).unflatten(
            0, (-1, chunks.size)
        )
        per_head = chunks.cells.fill(torch.cat((decay, beta.float().sigmoid()), dim=-1)).unflatten(
            0, (-1, chunks.size)
        )
        weight = torch.cat(
            [
                self._own(part)
                for part in self.conv1d.weight.split([self.cp_group.size() * s for s in sizes])
            ]
        )
        query, key, value = (
            F.silu(causal_conv(qkv, weight, per_step=chunks.per_step)).float().split(sizes, dim=-1)
        )
        query, key = (_unit(part.unflatten(-1, (-1, self.key_head_dim))) for part in (query, key))
        out = gated_delta_rule(
            query * self.key_head_dim**-0.5,
            key,
            value.unflatten(-1, (-1, self.value_head_dim)),
            *per_head.chunk(2, dim=-1),
            per_step=chunks.per_step,
        )
        return chunks.cells.empty(out.flatten(0, 1)).flatten(1)

    def _normalise(self, out: torch.Tensor) -> torch.Tensor:
        """Normalise per head. Each tensor-parallel rank has its own heads; this sums the weight's
        gradient over the ranks unless Megatron does (under sequence parallelism)."""
        if self.tp_size > 1 and not self.config.sequence_parallel:
            return self.out_norm(
                out, weight=copy_to_tensor_model_parallel_region(self.out_norm.weight)
            )
        return self.out_norm(out)

    def _own(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the rows of the heads that this context-parallel rank computes; the gradient of
        the other rows is 0."""
        return parameter.chunk(self.cp_group.size())[self.cp_group.rank()]

    def _to_heads(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Exchange all heads of this rank's positions for its share of the heads at all positions,
        in the order in which the ranks' parts are gathered."""
        count = self.cp_group.size()
        if count == 1:
            return parts
        shares = [part.unflatten(-1, (count, -1)) for part in parts]
        sizes = [share.shape[-1] for share in shares]
        sent = torch.cat(shares, dim=-1).transpose(0, 1)
        return list(_Exchange.apply(sent, self.cp_group).flatten(0, 1).split(sizes, dim=-1))

    def _from_heads(self, out: torch.Tensor) -> torch.Tensor:
        """Invert `_to_heads`, for the output."""
        count = self.cp_group.size()
        if count == 1:
            return out
        return (
            _Exchange.apply(out.unflatten(0, (count, -1)), self.cp_group).transpose(0, 1).flatten(1)
        )


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + _TINY).rsqrt()


class _Exchange(torch.autograd.Function):
    """Exchanges [ranks, ...] in a group: slice r goes to rank r, and is replaced by what that rank
    sends."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, ctx.group), None


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out
