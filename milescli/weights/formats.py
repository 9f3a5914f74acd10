"""Converts tensors of the model to the format that engines receive. `weights.format` names one:
built in here, an entry point, or an import path. Runs inside trainer ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from milescli.core.errors import RecipeError
from milescli.core.user_code import plugin_fix

if TYPE_CHECKING:
    import torch

    from milescli.weights.base import Bucket

HF = "hf"


class WeightFormat(Protocol):
    """Defines a plug-in of `weights.format`."""

    def __call__(self, *, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Return what the engines' own loader gets in place of one complete tensor: other names,
        another dtype, a tensor and its scales. Called on every rank for every tensor of each
        publish; equal input must give equal output."""
        ...


def hf(*, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the tensor as a Hugging Face folder stores it."""
    return [(name, tensor)]


def formatted(buckets: Iterator[Bucket], to_format: WeightFormat) -> Iterator[Bucket]:
    """Yield each bucket with its tensors in the format. Raises RecipeError."""
    for bucket in buckets:
        yield [pair for name, tensor in bucket for pair in pairs_of(to_format, name, tensor)]


def pairs_of(
    to_format: WeightFormat, name: str, tensor: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) pairs for one tensor. Raises RecipeError if the format returns anything
    else."""
    import torch

    made = list(to_format(name=name, tensor=tensor))
    for pair in made:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], torch.Tensor):
            raise RecipeError(
                f"the weight format returned {pair!r:.200} for `{name}`",
                why="engines receive pairs of a name and a tensor",
                fix=plugin_fix(to_format, "it returns a list of such pairs"),
            )
    return made


def check_format(to_format: WeightFormat) -> list[tuple[str, torch.Tensor]]:
    """Return the format's (name, tensor) pairs for a matrix and a gain. Raises RecipeError."""
    import torch

    matrix, gain = torch.arange(128.0).view(8, 16).bfloat16(), torch.ones(16).bfloat16()
    return [
        *pairs_of(to_format, "model.layers.0.self_attn.q_proj.weight", matrix),
        *pairs_of(to_format, "model.norm.weight", gain),
    ]
