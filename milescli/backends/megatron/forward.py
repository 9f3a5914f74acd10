"""Passes of the model over microbatches through Megatron's schedules: scoring without gradient, and
one update's forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplay

from milescli.backends.megatron import replay
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.microbatch import Microbatch
from milescli.train.vocab_parallel import VocabShard, target_logprobs

TokenLoss = Callable[[Microbatch, torch.Tensor, torch.Tensor], torch.Tensor]
"""(microbatch, log-probs [S], entropy [S]) -> the scalar that is differentiated"""


@dataclass(slots=True, kw_only=True)
class Passes:
    """The model, and what every pass over it needs."""

    model: torch.nn.Module
    """Megatron's DistributedDataParallel around the GPTModel."""
    mesh: Mesh
    vocab_size: int
    routers: list[tuple[int, RouterReplay]]
    """Empty without routing replay."""

    def score(
        self, microbatches: Sequence[Microbatch], *, temperature: float
    ) -> list[torch.Tensor]:
        """Log-prob of every target [S] per microbatch on ranks of the last stage; empty elsewhere.
        No gradient."""
        kept: list[torch.Tensor] = []

        def keep(
            microbatch: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor
        ) -> torch.Tensor:
            kept.append(logprobs)
            return logprobs.sum()

        with torch.no_grad():
            self._run(microbatches, keep, temperature=temperature, forward_only=True)
        return kept

    def train(
        self, microbatches: Sequence[Microbatch], loss: TokenLoss, *, temperature: float
    ) -> None:
        """Gradients of the sum of all microbatches' losses, on all ranks, reduced over the
        data-parallel ranks."""
        self._run(microbatches, loss, temperature=temperature, forward_only=False)

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        loss: TokenLoss,
        *,
        temperature: float,
        forward_only: bool,
    ) -> None:
        def forward_step(source: Iterator[Microbatch], model: torch.nn.Module):
            microbatch = next(source)
            if self.routers and microbatch.routed_experts is not None:
                replay.prepare_forward(self.routers, microbatch.routed_experts, mesh=self.mesh)
            output = model(
                microbatch.input_ids, microbatch.positions, None, packed_seq_params=microbatch.row
            )
            if self.routers and microbatch.routed_experts is not None:
                replay.after_forward(self.routers)

            def reduce(logits: torch.Tensor):
                logprobs, entropy = target_logprobs(
                    logits[0],
                    microbatch.target_ids,
                    shard=self._vocab_shard(logits),
                    temperature=temperature,
                )
                # Megatron wants a count of tokens; the weights of the batch have divided already
                return (
                    loss(microbatch, logprobs, entropy),
                    torch.ones((), dtype=torch.int, device=logits.device),
                    {},
                )

            return output, reduce

        try:
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(microbatches),
                model=self.model,
                num_microbatches=len(microbatches),
                seq_length=microbatches[0].input_ids.shape[1],
                micro_batch_size=1,
                forward_only=forward_only,
            )
        finally:
            replay.finish(self.routers)

    def _vocab_shard(self, logits: torch.Tensor) -> VocabShard:
        columns = logits.shape[-1]
        start = columns * self.mesh.tp_rank
        size = max(min(self.vocab_size - start, columns), 0)
        return VocabShard(
            start=start, size=size, group=self.mesh.tp_group if self.mesh.layout.tp > 1 else None
        )
