"""Rounds the same model in another way, to measure how much log-probs change by rounding alone: the
floor for the start check and the proof of conversions (`train.agreement`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SEED = 20


@contextmanager
def with_other_rounding(model: torch.nn.Module) -> Iterator[None]:
    """Multiply each layer's output by 1 + u * noise, element by element, within the block: u is the
    unit roundoff of its type (6e-8 in float32, 0.004 in bfloat16), the noise standard normal. The
    noise is equal on all ranks that hold the same tokens, and in each call."""
    handles = [
        layer.register_forward_hook(_Rounding(number))
        for number, layer in enumerate(model.decoder.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Rounding:
    """Implements the hook of one layer."""

    def __init__(self, number: int) -> None:
        self._generator = torch.Generator().manual_seed(SEED + number)

    def __call__(self, layer: torch.nn.Module, inputs: object, output: object) -> object:
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        unit = torch.finfo(hidden.dtype).eps / 2
        noise = torch.randn(hidden.shape, generator=self._generator).to(hidden.device)
        hidden = (hidden.float() * (1 + unit * noise)).to(hidden.dtype)
        return (hidden, *rest) if isinstance(output, tuple) else hidden
