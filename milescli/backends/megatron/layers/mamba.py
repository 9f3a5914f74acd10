"""Mamba-2 (arXiv 2405.21060) in plain PyTorch for Megatron's layer spec, over a row of packed
sequences. The parameters, their tensor-parallel split and their names in checkpoints are those of
Megatron's MambaMixer, which cannot be built without CUDA kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import _split_tensor_factory
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

from milescli.backends.megatron.layers.attention import PackedRow
from milescli.backends.megatron.layers.norm import RmsNorm
from milescli.models.facts import Mamba, ModelFacts

_CHUNK = 64
"""Positions that are computed by one matrix product; the recurrence runs between chunks."""


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, place: torch.Tensor
) -> torch.Tensor:
    """Return [S, channels] float32: each channel, convolved causally within each sequence. x [S,
    channels], weight [channels, kernel] with the current position last, place [S] the index of each
    position in its sequence."""
    wide, weight = x.float(), weight.float()
    out = wide * weight[:, -1]
    for back in range(1, weight.shape[-1]):
        if back >= x.shape[0]:
            break
        earlier = F.pad(wide, (0, 0, back, 0))[: x.shape[0]]
        out = out + torch.where((place >= back)[:, None], earlier, 0.0) * weight[:, -1 - back]
    return out if bias is None else out + bias.float()


def scan(
    x: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    sequence: torch.Tensor,
    chunk: int = _CHUNK,
) -> torch.Tensor:
    """Return y [S, H, P] of h_t = exp(decay_t) h_(t-1) + b_t x_t, y_t = c_t h_t, with h = 0 before
    each sequence, in chunks (arXiv 2405.21060, section 6): attention with decaying weights within a
    chunk, the recurrence between chunks.

    x [S, H, P], decay [S, H] (not positive), b and c [S, G, N], all float32; sequence [S] is the
    number of each position's sequence, ascending. H / G heads share a b and a c."""
    length, num_groups = x.shape[0], b.shape[1]
    chunk = min(chunk, length)
    missing = -length % chunk
    x, decay, b, c = (
        F.pad(part, (0, 0) * (part.dim() - 1) + (0, missing)) for part in (x, decay, b, c)
    )
    sequence = F.pad(sequence, (0, missing), value=-1).unflatten(0, (-1, chunk))
    # C chunks of Q positions; heads as G groups of R
    x = (
        x.unflatten(1, (num_groups, -1)).unflatten(0, (-1, chunk)).permute(0, 2, 3, 1, 4)
    )  # C G R Q P
    b, c = (part.unflatten(0, (-1, chunk)).transpose(1, 2) for part in (b, c))  # C G Q N
    # differences of sums: rounded to float32 only after they are taken
    total = (
        decay.double()
        .unflatten(1, (num_groups, -1))
        .unflatten(0, (-1, chunk))
        .cumsum(dim=1)
        .permute(0, 2, 3, 1)
    )  # C G R Q
    seen = (sequence[:, :, None] == sequence[:, None, :]).tril()[:, None, None]
    weights = (
        _exp(total[..., :, None] - total[..., None, :], where=seen)
        * (c @ b.transpose(-1, -2))[:, :, None]
    )
    y = weights @ x
    if len(sequence) > 1:
        y = y + _from_before(x, total, b, c, sequence=sequence)
    return y.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)[:length]


def _from_before(
    x: torch.Tensor,
    total: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    sequence: torch.Tensor,
) -> torch.Tensor:
    """Return the contribution of the earlier chunks to the positions of each chunk. Shapes as in
    `scan` after its rearrangement."""
    last = sequence[:, -1:]
    to_end = _exp(total[..., -1:] - total, where=(sequence == last)[:, None, None])  # C G R Q
    added = b.transpose(-1, -2)[:, :, None] @ (x * to_end[..., None])  # C G R N P
    goes_on = torch.cat([torch.zeros_like(last[:1], dtype=torch.bool), last[1:] == last[:-1]])
    decayed = _exp(total[..., -1], where=goes_on[..., None])[..., None, None]  # C G R 1 1
    states = [torch.zeros_like(added[0])]
    for number in range(len(added) - 1):
        states.append(states[-1] * decayed[number] + added[number])
    before = torch.cat([torch.full_like(last[:1], -1), last[:-1]])
    from_start = _exp(total, where=(sequence == before)[:, None, None])
    return from_start[..., None] * (c[:, :, None] @ torch.stack(states))


def _exp(exponent: torch.Tensor, *, where: torch.Tensor) -> torch.Tensor:
    """Return exp(exponent) in float32, and 0 outside of `where`: there the exponent may be so large
    that its exponential is infinite and its gradient NaN."""
    return exponent.float().masked_fill(~where, float("-inf")).exp()


def options(facts: ModelFacts) -> dict[str, object]:
    """Return Megatron's settings of Mamba-2; this package's mixer takes the same from the layer
    spec."""
    if facts.mamba is None:
        return {}
    return {
        "is_hybrid_model": True,
        "mamba_num_heads": facts.mamba.num_heads,
        "mamba_head_dim": facts.mamba.head_dim,
        "mamba_num_groups": facts.mamba.num_groups,
        "mamba_state_dim": facts.mamba.state_size,
    }


def layer_spec(config: TransformerConfig, mamba: Mamba) -> ModuleSpec:
    """Return Megatron's MambaLayer with the mixer and the norm of this package."""
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=ModuleSpec(module=RmsNorm, params={"eps": config.layernorm_epsilon}),
            mixer=ModuleSpec(module=PackedMamba, params={"mamba": mamba}),
            mamba_bda=get_bias_dropout_add,
            # checkpoints hold it under the name that it has within TransformerEngine's fused module
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


class PackedMamba(MegatronModule):
    """Implements Mamba-2 for packed rows: x [S (/ tp with sequence parallelism), 1, hidden_size] ->
    the same shape. S: positions of the packed row; H, G: heads and groups of this rank, P: dims of
    a head, N: of the state."""

    def __init__(
        self,
        config: TransformerConfig,
        d_model: int,
        *,
        mamba: Mamba,
        layer_number: int,
        pg_collection,
        pp_layer_offset: int = 0,
    ) -> None:
        """Called by Megatron."""
        super().__init__(config)
        tp = pg_collection.tp.size()
        assert mamba.num_groups % tp == 0, (
            f"{mamba.num_groups} groups cannot be shared by {tp} ranks"
        )
        self.mamba, self.tp_group = mamba, pg_collection.tp
        self.num_heads, self.num_groups = mamba.num_heads // tp, mamba.num_groups // tp
        inner, of_groups = self.num_heads * mamba.head_dim, self.num_groups * mamba.state_size
        self.in_proj_sizes = [inner, inner, of_groups, of_groups, self.num_heads]
        linear = {"config": config, "bias": False, "tp_group": pg_collection.tp}
        self.in_proj = ColumnParallelLinear(
            d_model,
            tp * sum(self.in_proj_sizes),
            gather_output=False,
            init_method=config.init_method,
            **linear,
        )
        channels = inner + 2 * of_groups
        self.conv1d = torch.nn.Conv1d(
            channels,
            channels,
            mamba.conv_kernel,
            groups=channels,
            bias=mamba.conv_bias,
            dtype=config.params_dtype,
        )
        for name in ("dt_bias", "A_log", "D"):
            self.register_parameter(
                name, torch.nn.Parameter(torch.zeros(self.num_heads, dtype=config.params_dtype))
            )
        self.norm = GatedNorm(inner, num_groups=self.num_groups, config=config)
        self.out_proj = RowParallelLinear(
            tp * inner,
            d_model,
            input_is_parallel=True,
            skip_bias_add=True,
            init_method=config.output_layer_init_method,
            **linear,
        )

    def forward(
        self, hidden_states, inference_context=None, *, packed_seq_params: PackedRow | None = None
    ):
        """Run the mixer; Megatron calls this. Returns (output, None) because it has no bias."""
        assert isinstance(packed_seq_params, PackedRow), "this mixer computes packed rows only"
        starts = packed_seq_params.cu_seqlens_q_padded
        projected, _ = self.in_proj(hidden_states)
        gate, mixed, steps = projected[:, 0].split(
            [self.in_proj_sizes[0], sum(self.in_proj_sizes[1:4]), self.in_proj_sizes[4]], dim=-1
        )
        place = torch.arange(projected.shape[0], dtype=starts.dtype, device=projected.device)
        sequence = torch.searchsorted(starts, place, right=True) - 1
        mixed = F.silu(
            convolve(
                mixed, self.conv1d.weight[:, 0], self.conv1d.bias, place=place - starts[sequence]
            )
        )
        x, b, c = mixed.split(self.in_proj_sizes[1:4], dim=-1)
        x = x.unflatten(-1, (self.num_heads, -1))
        steps = F.softplus(steps.float() + self.dt_bias.float())
        y = scan(
            x * steps[..., None],
            steps * -self.A_log.float().exp(),
            b.unflatten(-1, (self.num_groups, -1)),
            c.unflatten(-1, (self.num_groups, -1)),
            sequence=sequence,
        )
        y = y + self.D.float()[:, None] * x
        return self.out_proj(self.norm(y.flatten(1), gate).to(hidden_states.dtype)[:, None])

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return the state as Megatron's MambaMixer does: the parts of in_proj and conv1d have
        their own names, since each is cut separately. Called by Megatron."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        own: dict[str, torch.Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        sharded = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups
        )
        for name, module in self.named_children():
            inner = f"{prefix}{name}."
            if name in ("conv1d", "norm"):
                tensors = module.state_dict(keep_vars=True)
                sharded |= make_sharded_tensors_for_checkpoint(
                    tensors, inner, dict.fromkeys(tensors, 0), sharded_offsets, **groups
                )
            else:
                sharded |= sharded_state_dict_default(
                    module, inner, sharded_offsets, metadata, tp_group=self.tp_group
                )
        parts = ["z", "x", "B", "C", "dt"]
        for name, which in (
            ("in_proj.weight", slice(0, 5)),
            ("conv1d.weight", slice(1, 4)),
            ("conv1d.bias", slice(1, 4)),
        ):
            if whole := sharded.get(prefix + name):
                sharded[prefix + name] = _split_tensor_factory(
                    whole, self.in_proj_sizes[which], parts[which], 0
                )
        return sharded


class GatedNorm(torch.nn.Module):
    """Computes RMSNorm over each group's channels of y * silu(gate), in float32."""

    def __init__(self, size: int, *, num_groups: int, config: TransformerConfig) -> None:
        super().__init__()
        self.num_groups, self.eps = num_groups, config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))

    def forward(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the norm of y and gate, [S, channels of all groups] each."""
        grouped = (y.float() * F.silu(gate.float())).unflatten(-1, (self.num_groups, -1))
        scale = (grouped.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return (grouped * scale).flatten(-2) * self.weight.float()
