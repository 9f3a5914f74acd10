"""Passes of the model over microbatches through Megatron's schedules: scoring without gradient, and
one update's forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from milescli.backends.megatron.architecture.lora import Adapters
from milescli.backends.megatron.architecture.model import head
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.step import replay
from milescli.backends.megatron.step.microbatch import Microbatch
from milescli.models.facts import ModelFacts
from milescli.train.vocab_parallel import Head, target_logprobs, top_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Holds the model's outputs at the S positions of a microbatch: log-probs and entropy, or
    scores. For a loss, all but scores are computed only on the loss mask, and are 0.0 elsewhere: a
    prompt needs no logits."""

    logprobs: torch.Tensor | None = None
    """[S] of the targets."""
    entropy: torch.Tensor | None = None
    """[S]"""
    candidates: torch.Tensor | None = None
    """[S, k] log-probs of the candidate tokens of the pass."""
    scores: torch.Tensor | None = None
    """[S]"""
    next_logprobs: torch.Tensor | None = None
    """[S] log-probs of the tokens after the targets, from a trained MTP layer; only in training."""

    @property
    def values(self) -> torch.Tensor:
        """Return [S] log-probs, or scores."""
        values = self.logprobs if self.scores is None else self.scores
        assert values is not None, "a model says something"
        return values


TokenLoss = Callable[[Microbatch, Outputs], torch.Tensor]
"""(microbatch, outputs) -> the scalar that is differentiated"""
HiddenLoss = Callable[[Sequence[torch.Tensor], Microbatch], torch.Tensor]
"""(input of the output layer [S, hidden_size], from the model and if requested from its MTP layer,
or scores [S, 1]; microbatch) -> the scalar that is differentiated"""
Candidates = Callable[[Microbatch], torch.Tensor | None]
"""Microbatch -> [S, k] ids of tokens whose log-probs a loss needs besides the targets'; None: no
others"""


def no_candidates(_: Microbatch) -> None:
    """Return None: the loss needs only the targets' log-probs."""


@dataclass(slots=True, kw_only=True)
class Passes:
    """Runs passes over a model."""

    model: torch.nn.Module
    """Megatron's DistributedDataParallel around the GPTModel."""
    mesh: Mesh
    facts: ModelFacts
    vocab_size: int
    """Vocabulary of the policy: rows beyond are padding."""
    routers: replay.OwnRouters
    """Routers whose routes are replayed; empty without routing replay."""
    recomputes: bool = False
    """True if layers are recomputed in the backward pass."""
    mtp_trains_head: bool = False
    """True if the loss of a trained MTP layer has gradients for the output layer, too."""
    counts_routes: bool = False
    """True to compare, in training, replayed routes with the model's own; see
    `replay.share_of_changed_routes`."""
    adapters: Adapters | None = None
    """The model's adapter, if it has one."""

    def score(
        self, microbatches: Sequence[Microbatch], *, temperature: float, everywhere: bool = True
    ) -> list[torch.Tensor]:
        """Return the log-prob of every target, or the score, [S] per microbatch on ranks of the
        last stage; empty elsewhere. `everywhere`: include positions off the loss mask, where a
        log-prob is otherwise 0.0. No gradient."""
        rows: list[torch.Tensor] = []

        def keep(hidden: Sequence[torch.Tensor], microbatch: Microbatch) -> torch.Tensor:
            outputs = self._outputs(
                hidden, microbatch, temperature=temperature, everywhere=everywhere
            )
            rows.append(outputs.values)
            return rows[-1].sum()

        with torch.no_grad():
            self._run(microbatches, keep, forward_only=True)
        return rows

    def top_tokens(
        self, microbatches: Sequence[Microbatch], *, count: int, temperature: float
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (ids, log-probs) [S, count] of the most likely tokens per microbatch on ranks of
        the last stage; empty elsewhere. No gradient."""
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keep(hidden: Sequence[torch.Tensor], _: Microbatch) -> torch.Tensor:
            rows.append(top_logprobs(self._head(hidden[0]), count=count, temperature=temperature))
            return rows[-1][1].sum()

        with torch.no_grad():
            self._run(microbatches, keep, forward_only=True)
        return rows

    def train(
        self,
        microbatches: Sequence[Microbatch],
        loss: TokenLoss,
        *,
        temperature: float,
        candidates: Candidates = no_candidates,
    ) -> None:
        """Compute the gradients of the sum of all microbatches' losses on all ranks, reduced over
        the data-parallel ranks."""
        hidden_loss = self._hidden_loss(loss, temperature=temperature, candidates=candidates)
        self._run(microbatches, hidden_loss, forward_only=False)

    def measure(
        self,
        microbatches: Sequence[Microbatch],
        loss: TokenLoss,
        *,
        temperature: float,
        candidates: Candidates = no_candidates,
    ) -> None:
        """Call `loss` as `train` does, without gradients."""
        hidden_loss = self._hidden_loss(loss, temperature=temperature, candidates=candidates)
        with torch.no_grad():
            self._run(microbatches, hidden_loss, forward_only=True)

    def _hidden_loss(
        self, loss: TokenLoss, *, temperature: float, candidates: Candidates
    ) -> HiddenLoss:
        """Return the loss as a function of the model's hidden states."""

        def hidden_loss(hidden: Sequence[torch.Tensor], microbatch: Microbatch) -> torch.Tensor:
            extra = candidates(microbatch)
            outputs = self._outputs(hidden, microbatch, temperature=temperature, extra=extra)
            return loss(microbatch, outputs)

        return hidden_loss

    def _run(
        self, microbatches: Sequence[Microbatch], loss: HiddenLoss, *, forward_only: bool
    ) -> None:
        if self.adapters is not None:
            self.adapters.set_dropout(not forward_only)

        def forward_step(source: Iterator[Microbatch], model: torch.nn.Module):
            microbatch = next(source)
            replays = bool(self.routers) and microbatch.routed_experts is not None
            if replays:
                counts = self.counts_routes and not forward_only
                replay.prepare_forward(self.routers, microbatch, mesh=self.mesh, counts=counts)
            asks_mtp = self.facts.trains_mtp and not forward_only
            images = {} if microbatch.images is None else {"images": microbatch.images}
            output = model(
                microbatch.input_ids,
                microbatch.positions,
                None,
                packed_seq_params=microbatch.row,
                labels=microbatch.target_ids[None] if asks_mtp else None,
                **images,
            )
            if replays:
                replay.after_forward(self.routers, recomputes=self.recomputes and not forward_only)

            def reduce(output: torch.Tensor | tuple[torch.Tensor, ...]):
                # Megatron wants a count of tokens; the weights of the batch have divided already
                hidden = [part[0] for part in (output if asks_mtp else (output,))]
                return (
                    loss(hidden, microbatch),
                    torch.ones((), dtype=torch.int, device=hidden[0].device),
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
        hidden: Sequence[torch.Tensor],
        microbatch: Microbatch,
        *,
        temperature: float,
        extra: torch.Tensor | None = None,
        everywhere: bool = False,
    ) -> Outputs:
        """Return the outputs. `extra` [S, k]: ids of candidates; `everywhere`: include positions
        off the loss mask."""
        own, *of_mtp = hidden
        if self.facts.scores:
            return Outputs(scores=own[:, 0].float())
        after, further = microbatch.after, None
        if of_mtp and after is not None:
            ahead = self._head(of_mtp[0])
            if not self.mtp_trains_head:
                ahead = replace(ahead, weight=ahead.weight.detach())
            further, _ = _logprobs(ahead, after.ids, after.mask, temperature=temperature)
        targets = microbatch.target_ids
        if extra is not None:
            targets = torch.cat([targets[:, None], extra.long()], dim=1)
        mask = None if everywhere else microbatch.loss_mask
        logprobs, entropy = _logprobs(self._head(own), targets, mask, temperature=temperature)
        if extra is None:
            return Outputs(logprobs=logprobs, entropy=entropy, next_logprobs=further)
        return Outputs(
            logprobs=logprobs[:, 0],
            entropy=entropy,
            candidates=logprobs[:, 1:],
            next_logprobs=further,
        )

    def _head(self, hidden: torch.Tensor) -> Head:
        model = getattr(self.model, "module", self.model)
        return head(model, hidden, facts=self.facts, vocab_size=self.vocab_size, mesh=self.mesh)


def _logprobs(
    head: Head, targets: torch.Tensor, mask: torch.Tensor | None, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `target_logprobs` returns; off `mask` [S] nothing is computed, and both are
    0.0."""
    if mask is None:
        return target_logprobs(head, targets, temperature=temperature)
    places = mask.nonzero()[:, 0]
    within = replace(head, hidden=head.hidden[places])
    computed = target_logprobs(within, targets[places], temperature=temperature)
    logprobs, entropy = (
        values.new_zeros((len(mask), *values.shape[1:])).index_copy(0, places, values)
        for values in computed
    )
    return logprobs, entropy
