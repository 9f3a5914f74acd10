"""The gated delta net (Qwen3.5, Qwen3.6, Qwen3-Next) on a CPU in plain torch, in the place of
SGLang's kernels for CPUs, which have no wheel.

S is a head's state [key dim, value dim]; per token it decays by exp(g), then S += k (beta (v -
S'k))', and the output is S'q (arXiv 2412.06464, equation 10). Letters: B requests, T new tokens, Q
most new tokens of a request, H value heads, C tokens of a chunk.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from milescli.backends.sglang.inside.cpu.states import convolve, recur, step

CHUNK = 64
"""Tokens that are computed at once."""
NORM_EPSILON = 1e-6
"""Epsilon of the norm of queries and keys, as in SGLang's own kernels."""


def install() -> None:
    """Give SGLang's modules the functions that they look up when they are imported."""
    mamba = ModuleType("sgl_kernel.mamba")
    for function in (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu):
        setattr(mamba, function.__name__, function)
    sys.modules[mamba.__name__] = mamba
    for function in (
        fused_gdn_gating_cpu,
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
        fused_sigmoid_gating_delta_rule_update_cpu,
        fused_sigmoid_mul_cpu,
    ):
        setattr(torch.ops.sgl_kernel, function.__name__, function)
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.srt.models import qwen2_moe

    layernorm_gated.RMSNorm.forward = gated_norm
    fused_norm_gate.FusedRMSNormGated.forward = fused_gated_norm
    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated_shared_expert


def gated_norm(self, x: Tensor, z: Tensor | None = None) -> Tensor:
    """Compute RMSNorm, times silu(z): what SGLang's module does in Triton. These families do not
    use its other forms."""
    assert z is not None and self.group_size is None and self.norm_before_gate, (
        "not a gated delta net's norm"
    )
    scaled = _rms(x.float(), self.eps) * self.weight.float()
    gate = torch.sigmoid(z.float()) if self.activation == "sigmoid" else F.silu(z.float())
    return (scaled * gate).to(x.dtype)


def fused_gated_norm(
    self, x: Tensor, g: Tensor, residual=None, prenorm: bool = False, residual_in_fp32: bool = False
) -> Tensor:
    """Compute `fused_gated_norm_cpu` with the signature of Qwen3-Next's module."""
    assert residual is None and not prenorm and self.activation in ("silu", "swish"), (
        self.activation
    )
    return (_rms(x.float(), self.eps) * self.weight.float() * F.silu(g.float())).to(x.dtype)


def add_gated_shared_expert(
    hidden_TM: Tensor, gate_weight: Tensor, shared_TM: Tensor, output_TM: Tensor
) -> None:
    """Add the shared expert's output, times the sigmoid of its gate (`gate_weight` [M]), to that of
    the others, in place."""
    output_TM.add_(torch.sigmoid(hidden_TM @ gate_weight)[:, None] * shared_TM)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply x by sigmoid(gate) in place."""
    x.mul_(torch.sigmoid(gate.reshape(x.shape)))


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
):
    """Apply per-head norms that multiply by 1 + weight; shapes stay."""
    return tuple(
        (_rms(x.reshape(-1, head_dim).float(), eps) * (1.0 + weight.float()))
        .to(x.dtype)
        .reshape(x.shape)
        for x, weight in ((q, q_weight), (k, k_weight))
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
):
    """Apply the per-head norms if each query head is followed by its gate, and return (queries,
    keys, gates)."""
    query, gate = q_gate.reshape(-1, num_heads, 2, head_dim).unbind(2)
    query, key = fused_qk_gemma_rmsnorm_cpu(query, k, q_weight, k_weight, eps, head_dim)
    return query, key, gate.contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int
):
    """Split and reshape the projections to ([T, q k v], z [T, H, value_dim], b [T, H], a [T,
    H])."""
    qkv, z = qkvz.split(
        [2 * num_key_heads * key_dim + num_value_heads * value_dim, num_value_heads * value_dim],
        dim=-1,
    )
    b, a = ba.split([num_value_heads, num_value_heads], dim=-1)
    return (
        qkv.contiguous(),
        z.reshape(-1, num_value_heads, value_dim),
        b.contiguous(),
        a.contiguous(),
    )


def fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (g, beta), both [1, T, H] float32."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g[None], torch.sigmoid(b.float())[None]


def causal_conv1d_fn_cpu(
    x,
    weight,
    bias,
    *,
    activation,
    conv_states,
    has_initial_state,
    cache_indices,
    query_start_loc,
    seq_lens_cpu,
    **_,
) -> Tensor:
    """Convolve each request depth-wise; x [dim, T] holds the requests one after the other.
    `conv_states` [slots, dim, width - 1] provide the inputs before a continued request, and hold
    its last inputs afterwards. Returns [dim, T]."""
    num_states = weight.shape[1] - 1
    pieces = []
    starts = query_start_loc.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        new = x[:, starts[row] : starts[row + 1]]
        before = (
            conv_states[slot].to(x.dtype)
            if bool(has_initial_state[row])
            else x.new_zeros(x.shape[0], num_states)
        )
        whole = torch.cat([before, new], dim=1)
        conv_states[slot] = whole[:, whole.shape[1] - num_states :].to(conv_states.dtype)
        pieces.append(F.conv1d(whole[None], weight[:, None], bias, groups=x.shape[0])[0])
    return _activated(torch.cat(pieces, dim=1), activation)


def causal_conv1d_update_cpu(
    x,
    conv_states,
    weight,
    bias=None,
    activation=None,
    *,
    conv_state_indices,
    intermediate_conv_window=None,
    retrieve_parent_token=None,
    **_,
) -> Tensor:
    """Convolve one new token per request, x [B, dim] -> [B, dim], and advance the states by one; or
    the guesses of each, x [B, dim, N], as in `states.convolve`."""
    slots = conv_state_indices.long()
    if x.dim() == 3:
        mixed = convolve(
            x,
            conv_states,
            weight,
            slots=slots,
            parents=retrieve_parent_token,
            nodes=intermediate_conv_window,
        )
        return _activated(mixed if bias is None else mixed + bias[:, None], activation)
    whole = torch.cat([conv_states[slots].to(x.dtype), x[:, :, None]], dim=2)
    conv_states[slots] = whole[:, :, 1:].to(conv_states.dtype)
    mixed = (whole * weight).sum(-1)
    return _activated(mixed if bias is None else mixed + bias, activation)


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log,
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    intermediate_states_buffer=None,
    retrieve_parent_token=None,
    **_,
) -> Tensor:
    """Process one new token per request. q, k are [1, B, key heads, key dim], v [1, B, H, value
    dim], a, b [B, H]; the states [slots, H, value dim, key dim] advance. Returns [1, B, H, value
    dim]. For speculation, processes the guesses of each, B times as many, as in `states.recur`."""
    slots = initial_state_indices.long()
    g, beta = (gate[0] for gate in fused_gdn_gating_cpu(A_log, a, b, dt_bias))
    query, key = (_per_value_head(x[0], v.shape[2]) for x in (q, k))
    query, value = query * key.shape[-1] ** -0.5, v[0].float()
    if intermediate_states_buffer is not None:
        outputs = recur(
            query, key, value, g, beta,
            states=initial_state_source,
            slots=slots,
            parents=retrieve_parent_token,
            nodes=intermediate_states_buffer,
        )  # fmt: skip
        return outputs.to(v.dtype)[None]
    state_BHVK, outputs = step(initial_state_source[slots].float(), query, key, value, g, beta)
    initial_state_source[slots] = state_BHVK.to(initial_state_source.dtype)
    return outputs.to(v.dtype)[None]


def chunk_gated_delta_rule_cpu(
    *, q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, **_
):
    """Process several new tokens per request, one request after the other: q, k [1, T, key heads,
    key dim], v [1, T, H, value dim], g, beta [1, T, H]; the states [slots, H, value dim, key dim]
    advance. Returns ([1, T, H, value dim], None, None)."""
    slots, starts = initial_state_indices.long(), cu_seqlens.long()
    new_B = starts[1:] - starts[:-1]
    longest = (
        -(-int(new_B.max()) // CHUNK) * CHUNK if int(new_B.max()) > CHUNK else int(new_B.max())
    )
    offset_Q = torch.arange(longest)
    rows = (offset_Q[None] < new_B[:, None]).reshape(-1).nonzero().squeeze(1)

    def padded(x_TH: Tensor) -> Tensor:
        """Return [B, H, Q, ...]; a padded token changes nothing: its g, beta and key are 0."""
        flat = x_TH.new_zeros(
            (len(new_B) * longest, *x_TH.shape[1:]), dtype=torch.float32
        ).index_copy_(0, rows, x_TH.float())
        return flat.view(len(new_B), longest, *x_TH.shape[1:]).transpose(1, 2)

    heads = v.shape[2]
    query, key = (padded(_per_value_head(x[0], heads)) for x in (q, k))
    state, attended = scan(
        query * key.shape[-1] ** -0.5, key, padded(v[0]), padded(g[0]), padded(beta[0]),
        initial_state[slots].float().transpose(-1, -2),
    )  # fmt: skip
    initial_state[slots] = state.transpose(-1, -2).to(initial_state.dtype)
    flat = attended.transpose(1, 2).reshape(-1, heads, v.shape[-1])
    return flat.index_select(0, rows).to(v.dtype)[None], None, None


def scan(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (state after all tokens [B, H, K, V], outputs [B, H, Q, V]), float32. `query` and
    `key` [B, H, Q, K], `value` [B, H, Q, V], `g` and `beta` [B, H, Q], `state` [B, H, K, V].

    Within a chunk, with G the running sum of g: what each token writes, u_t = beta_t (v_t -
    exp(G_t) S'k_t - sum over s < t of exp(G_t - G_s) (k_s . k_t) u_s), is a unit lower triangular
    system."""
    outputs = []
    for start in range(0, query.shape[2], CHUNK):
        q, k, v, decay, b = (x[:, :, start : start + CHUNK] for x in (query, key, value, g, beta))
        total = decay.cumsum(-1)
        between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        system = b[..., None] * (between * (k @ k.transpose(-1, -2))).tril(-1)
        right = b[..., None] * (v - total.exp()[..., None] * (k @ state))
        written = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        outputs.append(
            total.exp()[..., None] * (q @ state) + (between * (q @ k.transpose(-1, -2))) @ written
        )
        last = total[..., -1:]
        state = (
            last.exp()[..., None] * state
            + ((last - total).exp()[..., None] * k).transpose(-1, -2) @ written
        )
    return state, torch.cat(outputs, dim=2)


def _per_value_head(x: Tensor, heads: int) -> Tensor:
    """Return [tokens, key heads, dim] -> [tokens, heads, dim] of length 1; neighbouring value heads
    share a key head."""
    x = x.float()
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _activated(x: Tensor, activation: str | None) -> Tensor:
    assert activation in (None, "silu", "swish"), activation
    return x if activation is None else F.silu(x)
