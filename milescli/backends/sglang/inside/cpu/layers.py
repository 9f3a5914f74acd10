"""Layers of an engine on a CPU: norms, gates and rotary embedding in compiled kernels, linear
layers and the output layer by oneDNN, routing of experts in plain torch. SGLang's plain forms of
the first are chains of a dozen small calls each, and of a small model these take as long as its
products."""

from __future__ import annotations

import torch

from milescli.platform import cpu_kernels, exact
from milescli.platform.onednn import product


def install() -> None:
    """Put the layers of this module in place of SGLang's."""
    _install_elementwise()
    _install_products()
    _install_experts()


def _install_elementwise() -> None:
    """Wrap the plain forms of these layers, which still compute all that is not float32 or not
    usual. Does nothing where the kernels are missing."""
    if not cpu_kernels.is_available():
        return
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import Gemma3RMSNorm, RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

    rotate_plainly, normalise_plainly = RotaryEmbedding.forward_native, RMSNorm.forward_native
    gate_plainly = SiluAndMul.forward_native
    normalise_around_zero_plainly = Gemma3RMSNorm.forward_native

    def rotate_both(self, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
        usual = (
            self.is_neox_style
            and self.rotary_dim == self.head_size
            and self._apply_rotary_emb_wrapped is apply_rotary_emb
            and not hasattr(self, "sin_cos_cache")
            and self.cos_sin_cache.dtype is torch.float32
        )
        assert usual or not exact.is_on(), "the plan refuses it"
        if not usual or offsets is not None or not (query.dtype is key.dtype and _is_wide(query)):
            return rotate_plainly(self, positions, query, key, offsets, fused_set_kv_buffer_arg)
        cosine, sine = self.cos_sin_cache.chunk(2, dim=-1)
        positions = positions.flatten()
        query, key = (
            cpu_kernels.rotate(
                x.view(len(x), -1, self.head_size).float(), cosine, sine, positions=positions
            )
            .view(x.shape)
            .to(x.dtype)
            for x in (query, key)
        )
        return query, key

    def normalise(self, x, residual=None, post_residual_addition=None, quant_linear=None):
        unusual = self.variance_size_override or self.override_orig_dtype or self.fp32_residual
        plain = x.dtype is self.weight.dtype and _is_wide(x)
        if unusual or post_residual_addition is not None or not plain:
            return normalise_plainly(self, x, residual, post_residual_addition, quant_linear)
        if x.dtype is not torch.float32:
            added = x if residual is None else x + residual  # rounded first, as the trainer's are
            normed, _ = cpu_kernels.rms_norm(
                added.float(), self.weight.float(), self.variance_epsilon
            )
            normed = normed.to(x.dtype)
            return normed if residual is None else (normed, added)
        normed, added = cpu_kernels.rms_norm(
            x, self.weight, self.variance_epsilon, residual=residual
        )
        return normed if residual is None else (normed, added)

    def normalise_around_zero(self, x, residual=None):
        if not x.dtype is self.weight.dtype is torch.float32:
            return normalise_around_zero_plainly(self, x, residual)
        normed, added = cpu_kernels.rms_norm(x, 1.0 + self.weight, self.eps, residual=residual)
        return normed if residual is None else (normed, added)

    def gate(self, x):
        return cpu_kernels.swiglu(x.float()).to(x.dtype) if _is_wide(x) else gate_plainly(self, x)

    RotaryEmbedding.forward_native = rotate_both
    RMSNorm.forward_native = normalise
    Gemma3RMSNorm.forward_native = normalise_around_zero
    SiluAndMul.forward_native = gate


def _is_wide(x: torch.Tensor) -> bool:
    """Return True for what the kernels compute in float32: under `exact` bfloat16 too, which is
    rounded once at the end, as the trainer does."""
    return x.dtype is torch.float32 or (exact.is_on() and x.dtype is torch.bfloat16)


def _install_products() -> None:
    """Use oneDNN in linear layers that are not quantised, and in the output layer."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    def apply(self, layer, x, bias=None):
        return product(x, layer.weight, bias)

    UnquantizedLinearMethod.apply = apply
    compute = LogitsProcessor._compute_lm_head

    def compute_lm_head(self, hidden_states, lm_head, *arguments, **settings):
        weight = getattr(lm_head, "weight", None)
        plain = not (self.use_fp32_lm_head or hasattr(lm_head, "set_lora"))
        plain = plain and weight is not None and hidden_states.dtype is weight.dtype
        if plain and _is_wide(hidden_states):
            return product(hidden_states, weight, None)
        return compute(self, hidden_states, lm_head, *arguments, **settings)

    LogitsProcessor._compute_lm_head = compute_lm_head


def _install_experts() -> None:
    """Route experts by SGLang's plain torch form, which gives the same choice as its own CPU
    routing; the kernels of that have no wheel. The record of chosen experts is not pinned. Under
    `exact` experts are added as the trainer adds them."""
    from sglang.srt.layers.moe import fused_moe_native, topk
    from sglang.srt.mem_cache.pool_host import common

    topk.TopK.forward_cpu = topk.TopK.forward_native
    common._cuda_host_register = _not_pinned
    common._cuda_host_unregister = _not_pinned
    if exact.is_on():
        fused_moe_native.moe_forward_native = experts_in_order


def _not_pinned(*args: object, **kwargs: object) -> None:
    """Leave tensors unpinned: pinning is for copies to a GPU."""


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def experts_in_order(layer, x: torch.Tensor, topk_output, config) -> torch.Tensor:
    """Compute the chosen experts of x [tokens, hidden] -> the same shape, as Megatron does: each is
    weighted before its second matrix, and they are added in the order of their numbers. The
    signature is that of SGLang's `moe_forward_native`."""
    assert config.activation == "silu" and getattr(layer, "w13_weight_bias", None) is None
    of_input = getattr(layer, "rounded_input", _as_it_is)
    weights, ids, _ = topk_output
    out, chosen = torch.zeros_like(x, dtype=torch.float32), ids.long()
    for expert in chosen.unique().tolist():
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        both = product(of_input(x[rows]), layer.w13_weight[expert])
        inner = cpu_kernels.swiglu(both.float()) * weights[rows, place, None]
        down = product(of_input(inner.to(x.dtype)), layer.w2_weight[expert])
        out.index_add_(0, rows, down.float())
    return out.to(x.dtype)
