"""Switches `train.on_policy: exact` on in a process of an engine or a trainer on a CPU, and
computes the form of log-softmax that both use then. While it is on, the log-prob of a token has the
same bits in every such process, whatever else is computed with it:

- products of matrices by oneDNN, a single row doubled (`onednn.product`), - attention in which each
query is summed by itself (`cpu_kernels.attend_slots`) everywhere, - `log_total` over the whole
vocabulary, - experts that are weighted before their second matrix and added in the order of their
numbers.

The code that computes calls `is_on`; nothing switches it off again."""

from __future__ import annotations

import torch

from milescli.core.errors import MachineError
from milescli.platform import cpu_kernels

_is_on = False


def turn_on() -> None:
    """Make this process compute exactly from now on. Raises MachineError if it cannot."""
    global _is_on
    if not cpu_kernels.is_available():
        raise MachineError(
            "`train.on_policy=exact` needs the compiled kernels for this CPU",
            why="one of them sums the attention of each query separately, and they cannot be "
            "compiled",
            fix="miles doctor   # its check `kernels` shows what is missing",
        )
    if not torch.backends.mkldnn.is_available():
        raise MachineError(
            "`train.on_policy=exact` needs a PyTorch with oneDNN",
            why="in other libraries, a product depends on the other rows of the batch",
            fix="make install   # installs the tested PyTorch",
        )
    _is_on = True


def is_on() -> bool:
    """Return True if this process computes exactly."""
    return _is_on


def log_total(logits: torch.Tensor) -> torch.Tensor:
    """Return log sum exp of each row of float32 `logits` [rows, vocabulary] -> [rows]. A log-prob
    is a logit minus it. The bits of a row depend neither on other rows nor on the threads."""
    if logits.shape[0] == 1:
        # PyTorch cuts the sum over a lone long row between its threads, and never that of two rows
        return torch.logsumexp(logits.repeat(2, 1), dim=-1)[:1]
    return torch.logsumexp(logits, dim=-1)
