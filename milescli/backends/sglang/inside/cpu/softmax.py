"""Softmax over a whole vocabulary on a CPU, without the bias of torch's own kernel.

That kernel adds the exponentials of a row one after the other in float32, and loses those that are
small beside the sum so far. So all log-probs come out too high: on average by 4e-6 with 49,152
entries and by 3e-5 with 262,144 (real models, against float64). An exact trainer then seems to
disagree with the engine. `torch.logsumexp` and `sum` add pairwise and stay within 6e-7.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LARGE = 4096
"""Columns from which on rows are summed pairwise. Below, torch's kernel is off by 6e-7 at most, and
it is faster: attention uses it too."""


def install() -> None:
    """Replace torch's softmax for every caller in this process: the sampler, log-probs of prompts,
    speculation. `torch.nn.functional` calls the methods of tensors."""
    for owner in (torch, torch.Tensor):
        owner.softmax = _unless_large(owner.softmax, softmax)  # type: ignore[attr-defined]
        owner.log_softmax = _unless_large(owner.log_softmax, log_softmax)  # type: ignore[attr-defined]


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Compute exp(x - max) / sum over the last axis of float32 `logits`; keeps their shape."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    return weights.div_(weights.sum(-1, keepdim=True))


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Compute x - log(sum(exp(x))) over the last axis of float32 `logits`; keeps their shape."""
    return logits - logits.logsumexp(-1, keepdim=True)


def _unless_large(
    stock: Callable[..., torch.Tensor], accurate: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    def choose(input: torch.Tensor, dim: int | None = None, *rest, **settings) -> torch.Tensor:
        is_plain = not rest and not settings and input.dtype is torch.float32
        if is_plain and input.dim() and dim in (-1, input.dim() - 1) and input.shape[-1] >= LARGE:
            return accurate(input)
        return stock(input, dim, *rest, **settings)

    return choose
