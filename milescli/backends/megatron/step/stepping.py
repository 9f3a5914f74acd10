"""Computes the loss and the figures of one optimizer update: sums over microbatches, and their
reduction to a StepReport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from milescli.backends.megatron.layers.indexer_loss import RowLoss
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.step.forward import Outputs
from milescli.backends.megatron.step.microbatch import Microbatch
from milescli.backends.megatron.step.shard import RankShard
from milescli.core.errors import NotFiniteError, RecipeError
from milescli.core.plug_points import OBJECTIVES
from milescli.core.types import StepReport
from milescli.train.base import Objective, Reduce, TokenLoss
from milescli.train.packed_tokens import PackedTokens
from milescli.train.streams import Stream

_TOKEN_BITS = 32
"""Of a place: sequence number above, token below."""
_NOWHERE = 2**62
INDEXER_KL = "indexer_kl"
"""Figure of a step: what `end_indexer_losses` returns."""
MTP_LOSS = "mtp_loss"
"""Figure of a step: cross-entropy of the token after next by the MTP layer, in nats a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpTerm:
    """Adds the loss of an MTP layer to the objective's, in one update."""

    weight: float
    num_tokens: float
    """Number of tokens over which its mean is taken, over all ranks."""


def mtp_terms(own: RankShard, *, weight: float, mesh: Mesh) -> list[MtpTerm | None]:
    """Return [updates] the terms; None for an update without any. Collective over the ranks that
    hold tokens."""
    if not weight:
        return [None] * len(own.updates)
    masks = [
        [microbatch.after.mask for microbatch in microbatches if microbatch.after is not None]
        for microbatches in own.updates
    ]
    counts = torch.stack([torch.cat(of_update).sum() for of_update in masks])
    if mesh.is_last_stage and mesh.token_group is not None:
        dist.all_reduce(counts, group=mesh.token_group)
    return [MtpTerm(weight=weight, num_tokens=max(count, 1)) for count in counts.tolist()]


def begin_indexer_losses(own: RankShard, *, mesh: Mesh) -> None:
    """Set each row's part of the loss of the indexers: every real position has the same share in
    the mean over an update. Collective over the ranks that hold tokens."""
    real = [[microbatch.source >= 0 for microbatch in update] for update in own.updates]
    counts = torch.tensor([sum(int(row.sum()) for row in rows) for rows in real])
    counts = counts.to(mesh.device, torch.float32)
    if mesh.token_group is not None:
        dist.all_reduce(counts, group=mesh.token_group)
    for update, rows, count in zip(own.updates, real, counts, strict=True):
        for microbatch, row in zip(update, rows, strict=True):
            microbatch.row.indexer_loss = RowLoss(
                shares=row.to(mesh.device) / count.clamp_min(1.0),
                total=torch.zeros((), dtype=torch.float64, device=mesh.device),
            )


def end_indexer_losses(own: RankShard, *, num_indexers: int, mesh: Mesh) -> float:
    """Return the divergence of an indexer from the attention, in nats, as a mean over positions,
    indexers and updates. Collective; equal on all ranks."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for microbatch in own.microbatches:
        assert microbatch.row.indexer_loss is not None
        total += microbatch.row.indexer_loss.total
        microbatch.row.indexer_loss = None
    # every rank of tp has the divergences of all heads
    dist.all_reduce(total)
    return float(total) / (mesh.layout.tp * num_indexers * len(own.updates))


@dataclass(slots=True, kw_only=True)
class UpdateLoss:
    """Computes the loss of one update as `Passes.train` calls it, microbatch by microbatch, and
    sums the figures."""

    objective: Objective[Any]
    shard: RankShard
    mesh: Mesh
    measures_engine: bool
    """True to compare the engine's log-probs with the trainer's, before any update of the step."""
    mtp: MtpTerm | None = None
    logprobs: list[tuple[Microbatch, torch.Tensor]] | None = None
    """[S] log-probs of each microbatch so far that has a sequence of `shard.logprob_ids`, on the
    device; None if they are not needed."""
    reports_candidates: bool = False
    """True if `logprobs` are those of the first candidate, if there are any."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Float64, over the tokens of this rank so far."""
    peaks: dict[str, torch.Tensor] = field(default_factory=dict)
    rules: dict[str, Reduce] = field(default_factory=dict)
    """Reduction rules of the objective's figures."""
    bad_place: int = _NOWHERE
    """Place of this rank's first token whose loss is not finite."""

    def __call__(self, microbatch: Microbatch, outputs: Outputs) -> torch.Tensor:
        tokens = self.shard.tokens_of(
            microbatch,
            logprobs=outputs.logprobs,
            entropy=outputs.entropy,
            candidates=outputs.candidates,
            scores=outputs.scores,
        )
        with OBJECTIVES.guarded(self.shard.shard.objective):
            terms = self.objective.loss(tokens)
        if terms.loss.shape != outputs.values.shape:
            raise RecipeError(
                f"the objective `{self.shard.shard.objective}` returned a loss of shape "
                f"{list(terms.loss.shape)}",
                why=f"there are {len(outputs.values)} positions, and each needs a loss",
                fix="return one value per token; use tokens.spread for values of whole sequences",
            )
        # off the mask the value may be anything, also infinite: 0 * inf is nan
        loss = torch.where(tokens.loss_mask, terms.loss, 0.0)
        total = (loss * tokens.loss_weights).sum()
        if not bool(torch.isfinite(total)):
            self._note_bad_place(microbatch, loss.detach())
        self._add("loss", total.detach().double())
        self._add("num_loss_tokens", tokens.loss_mask.sum().double())
        num_tokens = torch.tensor(microbatch.num_tokens, dtype=torch.float64, device=total.device)
        self._add("num_tokens", num_tokens)
        self._add_figures(tokens, terms)
        if self.measures_engine and Stream.ENGINE in tokens:
            self._compare_with_engine(tokens)
        is_wanted = not set(self.shard.shard.logprob_ids).isdisjoint(microbatch.indices)
        if is_wanted and self.logprobs is not None and outputs.logprobs is not None:
            reported = outputs.logprobs
            if self.reports_candidates and outputs.candidates is not None:
                reported = outputs.candidates[:, 0]
            self.logprobs.append((microbatch, reported.detach()))
        if self.mtp is None or outputs.next_logprobs is None or microbatch.after is None:
            return total
        ahead = outputs.next_logprobs, microbatch.after.mask
        return total + self.mtp.weight * self._mtp_loss(*ahead, self.mtp)

    def _mtp_loss(self, logprobs: torch.Tensor, mask: torch.Tensor, term: MtpTerm) -> torch.Tensor:
        """Return a microbatch's contribution to the mean over the update. Both arguments: [S]."""
        loss = -torch.where(mask, logprobs, 0.0).sum() / term.num_tokens
        self.rules[MTP_LOSS] = Reduce.LOSS
        self._add(MTP_LOSS, loss.detach().double())
        return loss

    def candidates(self, microbatch: Microbatch) -> torch.Tensor | None:
        """Return [S, k] ids of the tokens whose log-probs the loss also needs, or None."""
        if Stream.CANDIDATES not in self.shard:
            return None
        return self.shard.take(Stream.CANDIDATES, microbatch.source)

    def _add_figures(self, tokens: PackedTokens, terms: TokenLoss) -> None:
        for name, figure in terms.figures.items():
            self.rules[name] = figure.reduce
            values = figure.values.detach()
            if figure.reduce is Reduce.MAX:
                self._raise_peak(name, torch.where(tokens.loss_mask, values, -torch.inf).max())
                continue
            if figure.reduce is Reduce.LOSS:
                values = values * tokens.loss_weights
            self._add(name, torch.where(tokens.loss_mask, values, 0.0).double().sum())

    def _compare_with_engine(self, tokens: PackedTokens) -> None:
        before = tokens[Stream.OLD] if Stream.OLD in tokens else tokens.logprobs.detach()
        gap = torch.where(tokens.loss_mask, (before - tokens[Stream.ENGINE]).abs(), 0.0)
        self._add("engine_gap", gap.double().sum())
        self._add("engine_gap_tokens", (gap != 0).sum().double())
        self._add("engine_tokens", tokens.loss_mask.sum().double())
        self._raise_peak("engine_gap_max", gap.max())

    def _add(self, name: str, value: torch.Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _raise_peak(self, name: str, value: torch.Tensor) -> None:
        value = value.double()
        self.peaks[name] = torch.maximum(self.peaks[name], value) if name in self.peaks else value

    def _note_bad_place(self, microbatch: Microbatch, loss: torch.Tensor) -> None:
        position = int(torch.nonzero(~torch.isfinite(loss * microbatch.loss_weights))[0])
        index = microbatch.indices[int(microbatch.places.sequence[position])]
        number = int(self.shard.shard.sequence_ids[index])
        place = (number << _TOKEN_BITS) + int(microbatch.places.offset[position])
        self.bad_place = min(self.bad_place, place)

    def require_finite(self) -> None:
        """Raise NotFiniteError on every rank, naming the first token whose loss is not finite.
        Collective."""
        first = torch.tensor([self.bad_place], device=self.mesh.device)
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
        if (place := int(first)) == _NOWHERE:
            return
        sequence, token = divmod(place, 1 << _TOKEN_BITS)
        raise NotFiniteError(
            f"the loss of sequence {sequence} of {self.shard.shard.num_sequences} is not finite",
            why=f"its token {token} has a log-prob or ratio that is NaN or infinite; the "
            "optimizer step was skipped",
            fix=[
                "lower train.optimizer.lr, or set train.optimizer.clip_grad=1.0",
                "resume from the previous checkpoint",
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFigures:
    """Holds the figures of one optimizer update over all ranks."""

    sums: dict[str, float]
    peaks: dict[str, float]
    rules: dict[str, Reduce]
    grad_norm: float


def reduce_figures(loss: UpdateLoss, *, grad_norm: float) -> UpdateFigures:
    """Return the figures reduced over the ranks that hold tokens. The other stages receive them, as
    they do not know what the objective reports. Collective; equal on all ranks."""
    mesh, figures = loss.mesh, [None]
    if mesh.is_last_stage:
        sums, peaks = _all_reduced(loss.sums, mesh), _all_reduced(loss.peaks, mesh, largest=True)
        figures = [(sums, peaks, loss.rules)]
    if mesh.layout.pp > 1:
        dist.broadcast_object_list(figures, src=mesh.reporter)
    sums, peaks, rules = figures[0]
    return UpdateFigures(sums=sums, peaks=peaks, rules=rules, grad_norm=grad_norm)


def _all_reduced(
    values: dict[str, torch.Tensor], mesh: Mesh, *, largest: bool = False
) -> dict[str, float]:
    if not values:
        return {}
    vector = torch.stack([value.to(mesh.device) for value in values.values()])
    if mesh.token_group is not None:
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(vector, op=operation, group=mesh.token_group)
    return dict(zip(values, vector.tolist(), strict=True))


def report(
    updates: Sequence[UpdateFigures],
    *,
    lr: float,
    num_microbatches: int,
    seconds: Mapping[str, float],
) -> StepReport:
    """Return the step's report: losses and gradient norm are means over the updates; the rest
    covers all trained tokens. `seconds` are those of a StepReport."""

    def total(name: str) -> float:
        return sum(update.sums.get(name, 0.0) for update in updates)

    num_loss_tokens = total("num_loss_tokens")
    figures = {}
    for name, rule in updates[0].rules.items():
        if rule is Reduce.MAX:
            figures[name] = max(update.peaks[name] for update in updates)
        elif rule is Reduce.LOSS:
            figures[name] = total(name) / len(updates)
        else:
            figures[name] = total(name) / max(num_loss_tokens, 1.0)
    return StepReport(
        loss=total("loss") / len(updates),
        grad_norm=sum(update.grad_norm for update in updates) / len(updates),
        lr=lr,
        logprob_diff_mean=total("engine_gap") / max(total("engine_tokens"), 1.0),
        logprob_diff_max=max(update.peaks.get("engine_gap_max", 0.0) for update in updates),
        logprob_diff_tokens=int(total("engine_gap_tokens")),
        num_tokens=int(total("num_tokens")),
        num_loss_tokens=int(num_loss_tokens),
        num_microbatches=num_microbatches,
        figures=figures,
        **seconds,
    )
