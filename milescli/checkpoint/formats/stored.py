"""Converts plain tensors to those that a quantised folder stores and engines receive: export and
publishing share it. Holds the tensors of one fused group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from milescli.checkpoint.formats.base import Scheme, quantise_by_rows, rounded_by_rows
from milescli.checkpoint.source import require_finite
from milescli.models.precision import Choice

Named = tuple[str, Tensor]


def stored(
    tensors: Iterable[Named],
    choices: Mapping[str, Choice],
    scheme: Scheme | None,
    *,
    plain: Callable[[str, Tensor], Tensor],
    where: str | None = None,
) -> Iterator[Named]:
    """Yield (name, tensor) as the folder stores them: the tensors that `choices` quantises, by
    `scheme`, and the others as `plain(name, tensor)` returns them. Tensors that share a global
    scale must be consecutive. With `where`, raises CheckpointError, which names it, for a weight
    that is not finite in its stored dtype."""
    for unit in _units(
        tensors, choices, together=scheme is not None and scheme.codec.needs_largest
    ):
        name, tensor = unit[0]
        if _is_plain(name, choices):
            unit = [(name, plain(name, tensor))]
        if where is not None:
            for name, tensor in unit:
                require_finite(tensor, name=name, where=where)
        yield from unit if _is_plain(name, choices) else _quantised(unit, scheme)


def rounded(
    tensors: Iterable[Named], choices: Mapping[str, Choice], scheme: Scheme
) -> Iterator[Named]:
    """Yield the tensors under their own names: those that `choices` quantises are rounded to the
    scheme's numbers, in their own dtype."""
    codec = scheme.codec
    for unit in _units(tensors, choices, together=codec.needs_largest):
        if _is_plain(unit[0][0], choices):
            yield from unit
            continue
        largest = largest_of([tensor for _, tensor in unit]) if codec.needs_largest else None
        for name, tensor in unit:
            yield name, rounded_by_rows(codec, tensor, largest)


def _is_plain(name: str, choices: Mapping[str, Choice]) -> bool:
    choice = choices.get(name)
    return choice is None or choice.form is None


def _units(
    tensors: Iterable[Named], choices: Mapping[str, Choice], *, together: bool
) -> Iterator[list[Named]]:
    """Yield each tensor alone, or with the tensors that share its global scale."""
    waiting: list[Named] = []
    for name, tensor in tensors:
        if not together or _is_plain(name, choices):
            yield [(name, tensor)]
            continue
        waiting.append((name, tensor))
        group = {other for other in choices[name].fused if choices[other].form}
        if {module for module, _ in waiting} == group:
            yield waiting
            waiting = []
    assert not waiting, [name for name, _ in waiting]


def _quantised(waiting: Sequence[Named], scheme: Scheme | None) -> Iterator[Named]:
    assert scheme is not None, waiting[0][0]
    largest = largest_of([tensor for _, tensor in waiting]) if scheme.codec.needs_largest else None
    for name, tensor in waiting:
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


def largest_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of tensors that share a global scale, float32."""
    return torch.stack([tensor.abs().max() for tensor in tensors]).max().float()


def matrices(tensor: Tensor, scheme: Scheme) -> Iterator[Tensor]:
    """Yield the [rows, columns] matrices to quantise: the tensor itself, or each of stacked
    experts, transposed."""
    if not scheme.transposed:
        yield tensor
        return
    for row in tensor:
        yield row.transpose(-1, -2)
