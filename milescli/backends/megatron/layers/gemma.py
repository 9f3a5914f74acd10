"""What Gemma has outside of its layers, for Megatron's GPTModel. Used by `model`."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel


class ScaledEmbeddings(GPTModel):
    """GPTModel whose embeddings are multiplied by a number, rounded to their dtype as Hugging Face
    does it: where they lie, so under any layout."""

    def __init__(self, *, scale: float, **options) -> None:
        """`options`: of GPTModel."""
        super().__init__(**options)
        self.embedding_scale = scale
        if self.pre_process:
            self.embedding.register_forward_hook(self._scale)

    def _scale(self, module, inputs, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings * torch.tensor(
            self.embedding_scale, dtype=embeddings.dtype, device=embeddings.device
        )
