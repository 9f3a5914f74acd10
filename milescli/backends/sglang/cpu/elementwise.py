"""Norms, gates and rotary embedding of an engine in compiled kernels. SGLang's plain forms are
chains of a dozen small calls each, and of a small model these take as long as its products."""

from __future__ import annotations

import torch

from milescli.platform import cpu_kernels


def install() -> None:
    """Around the plain forms of these layers, which stay for all that is not float32, or not usual;
    nowhere if there are no kernels."""
    if not cpu_kernels.are_there():
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
        if not usual or offsets is not None or not query.dtype is key.dtype is torch.float32:
            return rotate_plainly(self, positions, query, key, offsets, fused_set_kv_buffer_arg)
        cosine, sine = self.cos_sin_cache.chunk(2, dim=-1)
        positions = positions.flatten()
        query, key = (
            cpu_kernels.rotate(
                x.view(len(x), -1, self.head_size), cosine, sine, positions=positions
            ).view(x.shape)
            for x in (query, key)
        )
        return query, key

    def normalise(self, x, residual=None, post_residual_addition=None, quant_linear=None):
        unusual = self.variance_size_override or self.override_orig_dtype or self.fp32_residual
        plain = x.dtype is self.weight.dtype is torch.float32
        if unusual or post_residual_addition is not None or not plain:
            return normalise_plainly(self, x, residual, post_residual_addition, quant_linear)
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
        return cpu_kernels.swiglu(x) if x.dtype is torch.float32 else gate_plainly(self, x)

    RotaryEmbedding.forward_native = rotate_both
    RMSNorm.forward_native = normalise
    Gemma3RMSNorm.forward_native = normalise_around_zero
    SiluAndMul.forward_native = gate
