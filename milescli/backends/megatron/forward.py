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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What a model says at the S positions of a microbatch: log-probs and entropy, or scores."""

    logprobs: torch.Tensor | None = None
    """[S] of the targets."""
    entropy: torch.Tensor | None = None
    """[S]"""
    scores: torch.Tensor | None = None
    """[S]"""

    @property
    def values(self) -> torch.Tensor:
        """[S] log-probs, or scores."""
        values = self.logprobs if self.scores is None else self.scores
        assert values is not None, "a model says something"
        return values


TokenLoss = Callable[[Microbatch, Outputs], torch.Tensor]
"""-> the scalar that is differentiated"""


@dataclass(slots=True, kw_only=True)
class Passes:
    """The model, and what every pass over it needs."""

    model: torch.nn.Module
    """Megatron's DistributedDataParallel around the GPTModel."""
    mesh: Mesh
    vocab_size: int
    gives_scores: bool
    """Instead of log-probs."""
    routers: list[tuple[int, RouterReplay]]
    """Empty without routing replay."""

    def score(
        self, microbatches: Sequence[Microbatch], *, temperature: float
    ) -> list[torch.Tensor]:
        """Log-prob of every target, or score, [S] per microbatch on ranks of the last stage; empty
        elsewhere. No gradient."""
        kept: list[torch.Tensor] = []

        def keep(microbatch: Microbatch, outputs: Outputs) -> torch.Tensor:
            kept.append(outputs.values)
            return outputs.values.sum()

        with torch.no_grad():
            self._run(microbatches, keep, temperature=temperature, forward_only=True)
        return kept

    def train(
        self, microbatches: Sequence[Microbatch], loss: TokenLoss, *, temperature: float
    ) -> None:
        """Gradients of the sum of all microbatches' losses, on all ranks, reduced over the
        data-parallel ranks."""
        self._run(microbatches, loss, temperature=temperature, forward_only=False)

    def measure(
        self, microbatches: Sequence[Microbatch], loss: TokenLoss, *, temperature: float
    ) -> None:
        """Call `loss` as `train` does, and nothing else happens."""
        with torch.no_grad():
            self._run(microbatches, loss, temperature=temperature, forward_only=True)

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
                outputs = self._outputs(logits[0], microbatch, temperature=temperature)
                # Megatron wants a count of tokens; the weights of the batch have divided already
                return (
                    loss(microbatch, outputs),
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

    def _outputs(
        self, logits: torch.Tensor, microbatch: Microbatch, *, temperature: float
    ) -> Outputs:
        if self.gives_scores:
            return Outputs(scores=logits[:, 0].float())
        logprobs, entropy = target_logprobs(
            logits,
            microbatch.target_ids,
            shard=self._vocab_shard(logits),
            temperature=temperature,
        )
        return Outputs(logprobs=logprobs, entropy=entropy)

    def _vocab_shard(self, logits: torch.Tensor) -> VocabShard:
        columns = logits.shape[-1]
        start = columns * self.mesh.tp_rank
        size = max(min(self.vocab_size - start, columns), 0)
        return VocabShard(
            start=start, size=size, group=self.mesh.tp_group if self.mesh.layout.tp > 1 else None
        )
