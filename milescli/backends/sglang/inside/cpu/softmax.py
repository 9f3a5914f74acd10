"""Softmax over a whole vocabulary on a CPU, without the bias of torch's own kernel.

That kernel adds the exponentials of a row one after the other in float32, and loses those that are
small beside the sum so far. So all log-probs come out too high: on average by 4e-6 with 49,152
entries and by 3e-5 with 262,144 (real models, against float64). An exact trainer then seems to
disagree with the engine. `torch.logsumexp` and `sum` add pairwise and stay within 6e-7.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from milescli.platform import exact

LARGE = 4096
"""Columns from which on rows are summed pairwise. Below, torch's kernel is off by 6e-7 at most, and
it is faster: attention uses it too."""


def install() -> None:
    """Replace torch's softmax for every caller in this process: the sampler, log-probs of prompts,
    speculation. `torch.nn.functional` calls the methods of tensors. Under `exact`, log-probs have
    the trainer's form whatever the size of the vocabulary."""
    least = 1 if exact.is_on() else LARGE
    for owner in (torch, torch.Tensor):
        owner.softmax = _from(LARGE, owner.softmax, softmax)  # type: ignore[attr-defined]
        owner.log_softmax = _from(least, owner.log_softmax, log_softmax)  # type: ignore[attr-defined]


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Compute exp(x - max) / sum over the last axis of float32 `logits`; keeps their shape."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    return weights.div_(weights.sum(-1, keepdim=True))


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Compute x - log(sum(exp(x))) over the last axis of float32 `logits`; keeps their shape."""
    return logits - exact.log_total(logits)[..., None]


def _from(
    least: int,
    stock: Callable[..., torch.Tensor],
    accurate: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """`accurate` for rows of at least so many columns, `stock` for all else."""

    def choose(input: torch.Tensor, dim: int | None = None, *rest, **settings) -> torch.Tensor:
        is_plain = not rest and not settings and input.dtype is torch.float32
        if is_plain and input.dim() and dim in (-1, input.dim() - 1) and input.shape[-1] >= least:
            return accurate(input)
        return stock(input, dim, *rest, **settings)

    return choose
