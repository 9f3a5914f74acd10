"""Matrix products of an engine's linear layers by oneDNN, which has kernels for the vector units of
every vendor: MKL, torch's own choice for float32, takes narrower ones on other vendors' processors
and is less than half as fast there."""

from __future__ import annotations

import torch
import torch.nn.functional as F

FEW_ROWS = 16
"""With fewer, the product is over before oneDNN has looked its kernel up."""


def install() -> None:
    """Into linear layers that are not quantised, and the output layer."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    if not torch.backends.mkldnn.is_available():
        return

    def apply(self, layer, x, bias=None):
        return product(x, layer.weight, bias)

    UnquantizedLinearMethod.apply = apply
    compute = LogitsProcessor._compute_lm_head

    def compute_lm_head(self, hidden_states, lm_head, *arguments, **settings):
        weight = getattr(lm_head, "weight", None)
        plain = not (self.use_fp32_lm_head or hasattr(lm_head, "set_lora"))
        if plain and weight is not None and hidden_states.dtype is weight.dtype is torch.float32:
            return product(hidden_states, weight, None)
        return compute(self, hidden_states, lm_head, *arguments, **settings)

    LogitsProcessor._compute_lm_head = compute_lm_head


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., i] and [o, i] -> [..., o]."""
    is_float = x.dtype is weight.dtype is torch.float32
    if not is_float or x.numel() < FEW_ROWS * x.shape[-1]:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
