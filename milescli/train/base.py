"""What the loop needs from a trainer, and what one optimizer step eats. Protocol and data only."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch

from milescli.core.types import StepReport, WeightVersion


class LossKind(StrEnum):
    """What a batch is differentiated by."""

    POLICY = "policy"
    """Clipped surrogate, KL and entropy terms as the recipe says."""
    SUPERVISED = "supervised"
    """Negative log-likelihood (warm-up)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One step's answers, packed end to end without padding. T: positions over all sequences; N:
    sequences.

    Position t of a sequence holds token t as input and token t + 1 as target, so a sequence of n
    tokens takes n - 1 positions. Example: tokens [a b | c d] with answer [c d] -> inputs a b c,
    targets b c d, loss mask 0 1 1.
    """

    kind: LossKind
    input_ids: torch.Tensor
    """[T] int64"""
    target_ids: torch.Tensor
    """[T] int64"""
    loss_mask: torch.Tensor
    """[T] bool: the target is trained on."""
    loss_weights: torch.Tensor
    """[T] float32, 0 off the mask: loss = sum over positions of weight * token loss, over the whole
    update, whatever the split into ranks and microbatches. token_mean: 1 / (trained tokens of the
    update); sequence_mean: 1 / (sequences of the update * trained tokens of the sequence)."""
    advantages: torch.Tensor
    """[T] float32, 0 off the mask and in supervised batches."""
    engine_logprobs: torch.Tensor
    """[T] float32 of the targets, at the sampling temperature; 0 off the mask."""
    cu_seqlens: list[int]
    """[N + 1] ascending; sequence i is positions cu_seqlens[i] .. cu_seqlens[i + 1]."""
    updates: list[list[list[list[int]]]]
    """updates[u][d][m]: sequence indices of microbatch m on data-parallel rank d in optimizer
    update u. All ranks of one update have equally many microbatches; one may be empty where there
    are too few sequences to go round. A microbatch keeps to the cap of tokens unless it is one lone
    longer sequence."""
    temperature: float = 1.0
    """Logits are divided by this before the softmax, as the engine did."""
    routed_experts: torch.Tensor | None = None
    """[T, num_layers, topk] int32 (R3), or None."""

    @property
    def num_sequences(self) -> int:
        """N"""
        return len(self.cu_seqlens) - 1


class Trainer(Protocol):
    """The training engine, all ranks of it, as the driver sees it. Every call is bounded and raises
    named errors."""

    async def step(self, batch: TrainBatch, *, lr: float) -> StepReport:
        """One pass over the batch: one optimizer update per entry of `batch.updates`, with the
        learning rate given."""

    async def logprobs(self, batch: TrainBatch) -> list[array[float]]:
        """Per sequence, [positions] log-prob of each target at `batch.temperature`; no gradient,
        nothing changes."""

    async def publish(self, version: WeightVersion) -> None:
        """Send the current weights to the engines, which hold `version` afterwards. The caller has
        paused them."""

    async def verify(self) -> None:
        """Compare what the engines hold with the current weights, bit for bit. The caller has
        paused them. Raises MismatchError."""

    async def reset_optimizer(self) -> None:
        """Forget the optimizer's moments (between warm-up and RL)."""

    async def freeze_reference(self) -> None:
        """The current weights become the reference of the KL term."""

    async def shed(self) -> None:
        """Move gradients and optimizer off the device, so that an engine's weights have room beside
        the trainer's (colocated)."""

    async def sleep(self) -> None:
        """Move weights, gradients and optimizer off the device (colocated); `wake` brings them
        back."""

    async def wake(self) -> None:
        """See `sleep`."""

    async def save(self, folder: Path) -> None:
        """Write weights, optimizer and RNG into `folder`. Returns when training may go on; with
        async save, the files are complete only after `finish_save`."""

    async def finish_save(self) -> None:
        """Wait until the last `save` is on disk."""

    async def load(self, folder: Path) -> None:
        """Take weights, optimizer and RNG from a folder that `save` wrote, under any layout."""
