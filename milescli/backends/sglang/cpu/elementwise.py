"""Rotary embedding and RMS norm of a decode step in few calls. SGLang's plain forms are chains of a
dozen small ones each, and of a small model these calls take as long as its products.

Letters: T tokens, D size of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def install() -> None:
    """Around the plain forms of both layers, which stay for all that is not float32, or not
    usual."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb
    from sglang.srt.model_executor.model_runner import ModelRunner

    rotations = Rotations()
    rotate_plainly, normalise_plainly = RotaryEmbedding.forward_native, RMSNorm.forward_native
    forward = ModelRunner.forward

    def forward_anew(self, *arguments, **settings):
        rotations.forget()
        return forward(self, *arguments, **settings)

    def rotate_both(self, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
        usual = (
            self.is_neox_style
            and self.rotary_dim == self.head_size
            and self._apply_rotary_emb_wrapped is apply_rotary_emb
            and not hasattr(self, "sin_cos_cache")
        )
        if not usual or offsets is not None or not query.dtype is key.dtype is torch.float32:
            return rotate_plainly(self, positions, query, key, offsets, fused_set_kv_buffer_arg)
        cosine, sine = rotations.at(positions, self.cos_sin_cache)
        return rotate(query, cosine, sine), rotate(key, cosine, sine)

    def normalise(self, x, residual=None, post_residual_addition=None, quant_linear=None):
        unusual = self.variance_size_override or self.override_orig_dtype or self.fp32_residual
        if unusual or post_residual_addition is not None or x.dtype is not torch.float32:
            return normalise_plainly(self, x, residual, post_residual_addition, quant_linear)
        if residual is not None:
            x = residual = x + residual
        normed = F.rms_norm(x, (self.hidden_size,), self.weight, self.variance_epsilon)
        return normed if residual is None else (normed, residual)

    ModelRunner.forward = forward_anew
    RotaryEmbedding.forward_native = rotate_both
    RMSNorm.forward_native = normalise


class Rotations:
    """Cosines and sines at the positions of one forward pass, which are those of all its layers."""

    def __init__(self) -> None:
        """Empty."""
        self.forget()

    def forget(self) -> None:
        """The next pass has other positions, perhaps in the same tensor."""
        self._made: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def at(self, positions: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, 1, D] cosines, and sines with the sign that `rotate` wants. `table`: [positions, D]
        cosines, then sines, of the D / 2 angles."""
        for known, of, cosine, sine in self._made:
            if known is positions and of is table:
                return cosine, sine
        cosine, sine = table.index_select(0, positions.flatten())[:, None].chunk(2, dim=-1)
        twice = torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)
        self._made.append((positions, table, *twice))
        return twice


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """[T, heads * D]: (a, b) -> (a cos - b sin, b cos + a sin) of the halves of each head
    (RoFormer, arXiv 2104.09864, eq. 34, halves instead of neighbours)."""
    heads = x.view(len(x), -1, cosine.shape[-1])
    swapped = heads.roll(cosine.shape[-1] // 2, dims=-1)
    return (heads * cosine).addcmul_(swapped, sine).view(x.shape)
