"""Rounds the weights of a model in transformers to a number format, by formulas that were written
for this file: none is of `checkpoint.formats`. Used by `plain_adamw`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Matrices that engines multiply at once."""


def rounded(weight: Tensor, form: str, largest: Tensor) -> Tensor:
    """[rows, columns]; `largest` is the largest magnitude of all matrices multiplied at once."""
    rows, columns = {"fp8": (128, 128), "nvfp4": (1, 16)}.get(form, (1, 32))
    shape = (weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
    blocks = weight.reshape(shape)
    peak = blocks.abs().amax((1, 3), keepdim=True)
    if form == "fp8":
        scale = peak / 448
        numbers = (blocks / scale).to(torch.float8_e4m3fn).float()
    elif form == "mxfp8":
        scale = torch.exp2(torch.ceil(torch.log2(peak / 464)))
        numbers = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    elif form == "int4":
        scale = (peak / 7).bfloat16().float()
        numbers = (blocks / scale).round().clamp(-8, 7)
    else:
        whole = torch.exp2(torch.ceil(torch.log2(largest / (6 * 448))))
        scale = (peak / 6 / whole).to(torch.float8_e4m3fn).float() * whole
        size = (blocks / scale).abs().clamp(max=6)
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        numbers = blocks.sign() * (size / step).round() * step
    return (numbers * scale).reshape(weight.shape)


def _all_rounded(matrices: Sequence[Tensor], form: str) -> Tensor:
    largest = torch.stack([matrix.abs().max() for matrix in matrices]).max()
    return torch.cat([rounded(matrix, form, largest) for matrix in matrices])


@contextmanager
def rounding(model: torch.nn.Module, form: str | None) -> Iterator[None]:
    """Lets the model have rounded weights meanwhile; its gradients are then of these."""
    weights = dict(model.named_parameters())
    kept = {name: weight.data for name, weight in weights.items()}
    stacked = [name for name, weight in weights.items() if weight.dim() == 3]
    for name in stacked if form else ():
        parts = 2 if name.endswith("gate_up_proj") else 1
        experts = [_all_rounded(one.chunk(parts), form) for one in kept[name]]
        weights[name].data = torch.stack(experts)
    for group in TOGETHER if form and not (form == "int4" and stacked) else ():
        for name in [name for name in weights if f".{group[0]}.weight" in name]:
            names = [name.replace(group[0], other) for other in group]
            sizes = [len(kept[other]) for other in names]
            parts = _all_rounded([kept[other] for other in names], form).split(sizes)
            for other, part in zip(names, parts, strict=True):
                weights[other].data = part
    yield
    for name, weight in weights.items():
        weight.data = kept[name]
