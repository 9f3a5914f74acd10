"""Converts plain tensors to those that a quantised folder stores, which are those that engines
receive: export and publishing share it. Holds the tensors of one fused group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from milescli.checkpoint.formats.base import Scheme, quantise_by_rows
from milescli.checkpoint.source import require_finite
from milescli.models.precision import Choice

Named = tuple[str, Tensor]


def stored(
    tensors: Iterable[Named],
    choices: Mapping[str, Choice],
    scheme: Scheme | None,
    *,
    plain: Callable[[str, Tensor], Tensor],
    where: str = "the weights that are exported",
) -> Iterator[Named]:
    """Yield (name, tensor) as the format stores them: the tensors that `choices` quantises, by
    `scheme`, and the others as `plain(name, tensor)` returns them.

    Tensors that share a global scale must be consecutive. Raises CheckpointError, which names
    `where`, for a weight that is not finite in its stored dtype.
    """
    waiting: list[Named] = []
    for name, tensor in tensors:
        choice = choices.get(name)
        if choice is None or choice.form is None:
            tensor = plain(name, tensor)
            require_finite(tensor, name=name, where=where)
            yield name, tensor
            continue
        assert scheme is not None, name
        require_finite(tensor, name=name, where=where)
        waiting.append((name, tensor))
        together = {other for other in choice.fused if choices[other].form}
        if not scheme.codec.needs_largest or {module for module, _ in waiting} == together:
            yield from _quantised(waiting, scheme)
            waiting = []
    assert not waiting, [name for name, _ in waiting]


def _quantised(waiting: Iterable[Named], scheme: Scheme) -> Iterator[Named]:
    listed = list(waiting)
    largest = torch.stack([tensor.abs().max() for _, tensor in listed]).max().float()
    for name, tensor in listed:
        names = scheme.names(name)
        pieces = [
            quantise_by_rows(scheme.codec, matrix, largest) for matrix in matrices(tensor, scheme)
        ]
        for role in pieces[0]:
            whole = (
                torch.stack([piece[role] for piece in pieces])
                if scheme.transposed
                else pieces[0][role]
            )
            grouped = role == "values" and scheme.grouped
            size = scheme.codec.block[1] // scheme.codec.per_element
            yield names[role], whole.unflatten(-1, (-1, size)) if grouped else whole
        if "shape" in names:
            yield names["shape"], torch.tensor(tensor.shape)


def matrices(tensor: Tensor, scheme: Scheme) -> Iterator[Tensor]:
    """Yield [rows, columns] as they are quantised: the tensor itself, or each of stacked experts,
    transposed."""
    if not scheme.transposed:
        yield tensor
        return
    for row in tensor:
        yield row.transpose(-1, -2)
