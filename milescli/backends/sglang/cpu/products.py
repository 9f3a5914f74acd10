"""Linear layers and the output layer of an engine by oneDNN."""

from __future__ import annotations

import torch

from milescli.platform.onednn import product


def install() -> None:
    """Into linear layers that are not quantised, and the output layer."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

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
