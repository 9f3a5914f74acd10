"""The parts of Megatron's GPTModel before and after its layers: scaled embeddings (Gemma), and what
replaces the output layer. Used by `model`."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule


class ScaledEmbeddings(GPTModel):
    """Multiplies GPTModel's embeddings by a number that is rounded to their dtype, as Hugging Face
    does; right after they are computed, so under any layout."""

    def __init__(self, *, scale: float | None, **options) -> None:
        """Pass `options` to GPTModel. `scale` None leaves the embeddings as they are."""
        super().__init__(**options)
        self.embedding_scale = scale
        if self.pre_process and scale is not None:
            self.embedding.register_forward_hook(self._scale)

    def _scale(self, module, inputs, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings * torch.tensor(
            self.embedding_scale, dtype=embeddings.dtype, device=embeddings.device
        )


class HiddenLayer(ColumnParallelLinear):
    """Replaces Megatron's output layer by one that returns its input; `train.vocab_parallel`
    computes the logits block by block. Its weight is unchanged."""

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return the input [positions, batch, hidden_size], with the positions of all
        sequence-parallel ranks, and no bias. Its gradient is summed over the tensor-parallel ranks,
        each of which adds that of its part of the vocabulary."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(input_, group=self.tp_group), None
        return copy_to_tensor_model_parallel_region(input_, group=self.tp_group), None


class ScoreLayer(MegatronModule):
    """Computes a score with a weight of one row, which every tensor-parallel rank has."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(
            torch.empty(1, config.hidden_size, dtype=config.params_dtype)
        )
        """[1, hidden_size]"""

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return the scores [positions, batch, 1] of [positions, batch, hidden_size], with the
        positions of all sequence-parallel ranks, and no bias."""
        if self.config.sequence_parallel:
            # each rank computes the whole loss, so that its gradient needs no sum
            input_ = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(input_, self.weight if weight is None else weight), None
