"""Passes of the model over microbatches through Megatron's schedules: scoring without gradient, and
one update's forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from milescli.backends.megatron import replay
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.microbatch import Microbatch
from milescli.train.vocab_parallel import VocabShard, target_logprobs, top_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What a model says at the S positions of a microbatch: log-probs and entropy, or scores."""

    logprobs: torch.Tensor | None = None
    """[S] of the targets."""
    entropy: torch.Tensor | None = None
    """[S]"""
    candidates: torch.Tensor | None = None
    """[S, k] log-probs of the tokens that the pass was asked about."""
    scores: torch.Tensor | None = None
    """[S]"""
    next_logprobs: torch.Tensor | None = None
    """[S] of the tokens after the targets, by an MTP layer that is trained; in training alone."""

    @property
    def values(self) -> torch.Tensor:
        """[S] log-probs, or scores."""
        values = self.logprobs if self.scores is None else self.scores
        assert values is not None, "a model says something"
        return values


TokenLoss = Callable[[Microbatch, Outputs], torch.Tensor]
"""-> the scalar that is differentiated"""
LogitsLoss = Callable[[Sequence[torch.Tensor], Microbatch], torch.Tensor]
"""(logits [S, columns] of the model, and of its MTP layer where it is asked; microbatch) -> the
same"""
Candidates = Callable[[Microbatch], torch.Tensor | None]
"""-> [S, k] ids of tokens whose log-probs a loss wants beside the targets'; None: of none"""


def no_candidates(_: Microbatch) -> None:
    """A loss wants the targets' alone."""


@dataclass(slots=True, kw_only=True)
class Passes:
    """The model, and what every pass over it needs."""

    model: torch.nn.Module
    """Megatron's DistributedDataParallel around the GPTModel."""
    mesh: Mesh
    vocab_size: int
    gives_scores: bool
    """Instead of log-probs."""
    routers: replay.OwnRouters
    """Empty without routing replay."""
    recomputes: bool = False
    """Layers are computed again in the backward pass."""
    trains_mtp: bool = False
    """The MTP layer is asked, too, in training."""
    counts_routes: bool = False
    """In training: hold replayed routes against the model's own; see
    `replay.share_that_differs`."""

    def score(
        self, microbatches: Sequence[Microbatch], *, temperature: float
    ) -> list[torch.Tensor]:
        """Log-prob of every target, or score, [S] per microbatch on ranks of the last stage; empty
        elsewhere. No gradient."""
        kept: list[torch.Tensor] = []

        def keep(logits: Sequence[torch.Tensor], microbatch: Microbatch) -> torch.Tensor:
            kept.append(self._outputs(logits, microbatch, temperature=temperature).values)
            return kept[-1].sum()

        with torch.no_grad():
            self._run(microbatches, keep, forward_only=True)
        return kept

    def likeliest(
        self, microbatches: Sequence[Microbatch], *, count: int, temperature: float
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(ids, log-probs) [S, count] of the likeliest tokens per microbatch on ranks of the last
        stage; empty elsewhere. No gradient."""
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keep(logits: Sequence[torch.Tensor], _: Microbatch) -> torch.Tensor:
            shard = self._vocab_shard(logits[0])
            kept.append(top_logprobs(logits[0], count=count, shard=shard, temperature=temperature))
            return kept[-1][1].sum()

        with torch.no_grad():
            self._run(microbatches, keep, forward_only=True)
        return kept

    def train(
        self,
        microbatches: Sequence[Microbatch],
        loss: TokenLoss,
        *,
        temperature: float,
        candidates: Candidates = no_candidates,
    ) -> None:
        """Gradients of the sum of all microbatches' losses, on all ranks, reduced over the
        data-parallel ranks."""
        told = self._telling(loss, temperature=temperature, candidates=candidates)
        self._run(microbatches, told, forward_only=False)

    def measure(
        self,
        microbatches: Sequence[Microbatch],
        loss: TokenLoss,
        *,
        temperature: float,
        candidates: Candidates = no_candidates,
    ) -> None:
        """Call `loss` as `train` does, and nothing else happens."""
        told = self._telling(loss, temperature=temperature, candidates=candidates)
        with torch.no_grad():
            self._run(microbatches, told, forward_only=True)

    def _telling(
        self, loss: TokenLoss, *, temperature: float, candidates: Candidates
    ) -> LogitsLoss:
        """The loss, given what the model says."""

        def told(logits: Sequence[torch.Tensor], microbatch: Microbatch) -> torch.Tensor:
            asked = candidates(microbatch)
            outputs = self._outputs(logits, microbatch, temperature=temperature, asked=asked)
            return loss(microbatch, outputs)

        return told

    def _run(
        self, microbatches: Sequence[Microbatch], loss: LogitsLoss, *, forward_only: bool
    ) -> None:
        def forward_step(source: Iterator[Microbatch], model: torch.nn.Module):
            microbatch = next(source)
            replays = bool(self.routers) and microbatch.routed_experts is not None
            if replays:
                counts = self.counts_routes and not forward_only
                replay.prepare_forward(self.routers, microbatch, mesh=self.mesh, counts=counts)
            asks_mtp = self.trains_mtp and not forward_only
            output = model(
                microbatch.input_ids,
                microbatch.positions,
                None,
                packed_seq_params=microbatch.row,
                labels=microbatch.target_ids[None] if asks_mtp else None,
            )
            if replays:
                replay.after_forward(self.routers, recomputes=self.recomputes and not forward_only)

            def reduce(output: torch.Tensor | tuple[torch.Tensor, ...]):
                # Megatron wants a count of tokens; the weights of the batch have divided already
                logits = [part[0] for part in (output if asks_mtp else (output,))]
                return (
                    loss(logits, microbatch),
                    torch.ones((), dtype=torch.int, device=logits[0].device),
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
        self,
        logits: Sequence[torch.Tensor],
        microbatch: Microbatch,
        *,
        temperature: float,
        asked: torch.Tensor | None = None,
    ) -> Outputs:
        """`asked`: [S, k] ids of candidates."""
        own, *of_mtp = logits
        if self.gives_scores:
            return Outputs(scores=own[:, 0].float())
        targets = microbatch.target_ids
        said = partial(target_logprobs, shard=self._vocab_shard(own), temperature=temperature)
        further = None
        if of_mtp and microbatch.after is not None:
            further, _ = said(of_mtp[0], microbatch.after.ids)
        if asked is not None:
            targets = torch.cat([targets[:, None], asked.long()], dim=1)
        logprobs, entropy = said(own, targets)
        if asked is None:
            return Outputs(logprobs=logprobs, entropy=entropy, next_logprobs=further)
        return Outputs(
            logprobs=logprobs[:, 0],
            entropy=entropy,
            candidates=logprobs[:, 1:],
            next_logprobs=further,
        )

    def _vocab_shard(self, logits: torch.Tensor) -> VocabShard:
        columns = logits.shape[-1]
        start = columns * self.mesh.tp_rank
        size = max(min(self.vocab_size - start, columns), 0)
        return VocabShard(
            start=start, size=size, group=self.mesh.tp_group if self.mesh.layout.tp > 1 else None
        )
