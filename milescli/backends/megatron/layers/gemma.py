"""What Gemma has outside of its layers, for Megatron's GPTModel: scaled embeddings and capped
logits. Used by `model`."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel

from milescli.backends.megatron.layers.softcap import softcap
from milescli.models.facts import ModelFacts


class ScaledAndCapped(GPTModel):
    """GPTModel whose embeddings are multiplied by a number, rounded to their dtype as Hugging Face
    does it, and whose logits are capped smoothly. Both are done where the part lies, so under any
    layout."""

    def __init__(self, *, facts: ModelFacts, **options) -> None:
        """`options`: of GPTModel."""
        super().__init__(**options)
        self.embedding_scale, self.logit_softcap = facts.embedding_scale, facts.logit_softcap
        if self.pre_process and self.embedding_scale is not None:
            self.embedding.register_forward_hook(self._scale)
        if self.post_process and self.logit_softcap is not None:
            self.output_layer.register_forward_hook(self._cap)

    def _scale(self, module, inputs, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings * torch.tensor(
            self.embedding_scale, dtype=embeddings.dtype, device=embeddings.device
        )

    def _cap(self, module, inputs, output):
        logits, bias = output
        return softcap(logits, self.logit_softcap), bias
