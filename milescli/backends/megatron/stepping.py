"""One optimizer update's loss and figures: what is summed while microbatches pass, and how it
becomes a StepReport."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.microbatch import Microbatch
from milescli.core.errors import NotFiniteError
from milescli.core.types import StepReport
from milescli.train.base import LossKind, TrainBatch
from milescli.train.losses import PolicyLoss, policy_terms

_SUMS = (
    "loss",
    "policy_loss",
    "entropy",
    "kl",
    "clipped",
    "ratio",
    "diff",
    "loss_tokens",
    "tokens",
)


@dataclass(slots=True, kw_only=True)
class StepLoss:
    """The loss of a batch as `Passes.train` calls it, microbatch after microbatch; adds up the
    figures as it goes."""

    kind: LossKind
    rule: PolicyLoss
    mesh: Mesh
    old_from_engine: bool
    old_logprobs: torch.Tensor | None = None
    """[T] on the host, of the whole batch; None: the current policy is the old one (or the engine's
    is)."""
    reference_logprobs: torch.Tensor | None = None
    """[T] on the host; None without a reference."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    diff_max: torch.Tensor | None = None
    bad_sequence: int = -1
    """First sequence of this rank whose loss is not finite."""

    def __call__(
        self, microbatch: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> torch.Tensor:
        loss, figures = (self._policy if self.kind is LossKind.POLICY else self._supervised)(
            microbatch, logprobs, entropy
        )
        mask = microbatch.loss_mask
        # off the mask the value may be anything, also infinite: 0 * inf is nan
        loss = torch.where(mask, loss, 0.0)
        total = (loss * microbatch.loss_weights).sum()
        if not bool(torch.isfinite(total)):
            self._name_bad_sequence(microbatch, loss.detach())
        figures |= {"entropy": entropy, "loss_tokens": torch.ones_like(entropy)}
        summed = {
            name: torch.where(mask, value.detach(), 0.0).double().sum()
            for name, value in figures.items()
        }
        summed["loss"] = total.detach().double()
        if self.kind is LossKind.SUPERVISED:
            summed["policy_loss"] = summed["loss"]
        summed["tokens"] = torch.tensor(
            float((microbatch.source >= 0).sum()), dtype=torch.float64, device=total.device
        )
        for name, value in summed.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        return total

    def _supervised(self, microbatch: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor):
        return -logprobs, {}

    def _policy(self, microbatch: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor):
        terms = policy_terms(
            logprobs,
            entropy,
            old_logprobs=self._old(microbatch, logprobs),
            advantages=microbatch.advantages,
            reference_logprobs=self._of_batch(self.reference_logprobs, microbatch),
            rule=self.rule,
        )
        diff = torch.where(
            microbatch.loss_mask, (logprobs.detach() - microbatch.engine_logprobs).abs(), 0.0
        )
        peak = diff.max()
        self.diff_max = peak if self.diff_max is None else torch.maximum(self.diff_max, peak)
        figures = {
            "policy_loss": terms.surrogate * microbatch.loss_weights,
            "kl": terms.kl,
            "clipped": terms.clipped.float(),
            "ratio": terms.ratio,
            "diff": diff,
        }
        return terms.loss, figures

    def _old(self, microbatch: Microbatch, logprobs: torch.Tensor) -> torch.Tensor:
        if self.old_from_engine:
            return microbatch.engine_logprobs
        stored = self._of_batch(self.old_logprobs, microbatch)
        return logprobs.detach() if stored is None else stored

    def _of_batch(self, values: torch.Tensor | None, microbatch: Microbatch) -> torch.Tensor | None:
        if values is None:
            return None
        return values[microbatch.source.clamp(min=0)].to(self.mesh.device)

    def _name_bad_sequence(self, microbatch: Microbatch, loss: torch.Tensor) -> None:
        if self.bad_sequence < 0:
            position = int(torch.nonzero(~torch.isfinite(loss * microbatch.loss_weights))[0])
            # one past the sources that came before: -2 marks a position whose sequence is looked up
            # by the caller
            self.bad_sequence = int(microbatch.source[position])

    def require_finite(self, batch: TrainBatch) -> None:
        """Raises NotFiniteError on every rank, naming the first sequence whose loss is not finite.
        Collective."""
        none = batch.cu_seqlens[-1]
        first = torch.tensor(
            [self.bad_sequence if self.bad_sequence >= 0 else none], device=self.mesh.device
        )
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
        if (position := int(first)) == none:
            return
        sequence = next(index for index, end in enumerate(batch.cu_seqlens[1:]) if position < end)
        raise NotFiniteError(
            f"the loss of answer {sequence} of {batch.num_sequences} is not finite",
            why=f"its token {position - batch.cu_seqlens[sequence]} gave a log-prob or ratio that "
            "is NaN or infinite; "
            "the optimizer was not stepped",
            fix=[
                "lower train.optimizer.lr, or set train.optimizer.clip_grad=1.0",
                "resume from the checkpoint before",
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFigures:
    """One optimizer update over all ranks."""

    sums: dict[str, float]
    diff_max: float
    grad_norm: float


def reduce_figures(step_loss: StepLoss, *, grad_norm: float, mesh: Mesh) -> UpdateFigures:
    """Sum over the ranks that speak for tokens. Collective; equal on all ranks."""
    vector = torch.zeros(len(_SUMS), dtype=torch.float64, device=mesh.device)
    peak = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    if mesh.speaks_for_tokens:
        for index, name in enumerate(_SUMS):
            vector[index] = step_loss.sums.get(name, 0.0)
        if step_loss.diff_max is not None:
            peak[0] = step_loss.diff_max
    dist.all_reduce(vector)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return UpdateFigures(
        sums=dict(zip(_SUMS, vector.tolist(), strict=True)),
        diff_max=float(peak),
        grad_norm=grad_norm,
    )


def report(
    updates: list[UpdateFigures],
    *,
    lr: float,
    num_microbatches: int,
    forward_backward_s: float,
    optimizer_s: float,
) -> StepReport:
    """Losses and gradient norm: mean over the updates; the rest over all trained tokens."""
    total = {name: sum(update.sums[name] for update in updates) for name in _SUMS}
    tokens = max(total["loss_tokens"], 1.0)
    return StepReport(
        loss=total["loss"] / len(updates),
        policy_loss=total["policy_loss"] / len(updates),
        entropy=total["entropy"] / tokens,
        kl=total["kl"] / tokens,
        clip_fraction=total["clipped"] / tokens,
        ratio_mean=total["ratio"] / tokens if total["ratio"] else 1.0,
        grad_norm=sum(update.grad_norm for update in updates) / len(updates),
        lr=lr,
        logprob_diff_mean=total["diff"] / tokens,
        logprob_diff_max=max(update.diff_max for update in updates),
        num_tokens=int(total["tokens"]),
        num_loss_tokens=int(total["loss_tokens"]),
        num_microbatches=num_microbatches,
        forward_backward_s=forward_backward_s,
        optimizer_s=optimizer_s,
    )
