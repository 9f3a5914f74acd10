"""Maps entries of the weight table to keys of a `torch_dist` checkpoint, with the position of each
tensor in them. Stock Megatron-Core's model looks up these keys in `sharded_state_dict`; its config
and modules decide which name it uses, so all names are given."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from milescli.models.base import Entry, Rule, WeightTable
from milescli.models.engine_names import fused_names
from milescli.models.facts import ModelFacts
from milescli.models.transforms import concatenate, identity

_LAYER = re.compile(r"^decoder\.layers\.\d+\.")
_EXPERT = re.compile(r"\.local_experts\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Locates a box in a key's tensor."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    """Shape of the key's tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Describes what is stored as one piece: the Megatron tensor of an entry, or one of its
    consecutive parts."""

    entry: Entry
    part: int | None
    """Number of the part; None: all, fused."""
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """The first is the one that Megatron's own modules look up, if all layers are alike in one
    stacked tensor; the others name the same bytes."""

    @property
    def frame_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes in which the boxes require the bytes."""
        return tuple(dict.fromkeys(box.sizes for box in self.boxes))

    @property
    def name(self) -> str:
        """Return Megatron's name with the part, for people."""
        return self.entry.megatron if self.part is None else f"{self.entry.megatron} [{self.part}]"


def items_of(entry: Entry, table: WeightTable, *, stacked: bool) -> Iterator[Item]:
    """Yield the items of one entry. `stacked`: all layers have the same shapes and are rows of one
    tensor."""
    parts, whole = megatron_shapes(entry.rule, entry.facts)
    if entry.rule.suffixes:
        for number, (suffix, shape) in enumerate(zip(entry.rule.suffixes, parts, strict=True)):
            boxes = _boxes(
                entry, table, suffix=suffix, start=0, shape=shape, whole=shape, stacked=stacked
            )
            yield Item(entry=entry, part=number, shape=shape, boxes=boxes)
    elif entry.rule.fuse is concatenate and len(parts) > 1:
        start = 0
        for number, shape in enumerate(parts):
            boxes = _boxes(
                entry, table, suffix="", start=start, shape=shape, whole=whole, stacked=stacked
            )
            yield Item(entry=entry, part=number, shape=shape, boxes=boxes)
            start += shape[0]
    else:
        boxes = _boxes(entry, table, suffix="", start=0, shape=whole, whole=whole, stacked=stacked)
        yield Item(
            entry=entry, part=0 if entry.rule.fuse is identity else None, shape=whole, boxes=boxes
        )


def _boxes(
    entry: Entry,
    table: WeightTable,
    *,
    suffix: str,
    start: int,
    shape: tuple[int, ...],
    whole: tuple[int, ...],
    stacked: bool,
) -> tuple[Box, ...]:
    experts = () if entry.expert is None else (table.facts.num_experts,)
    expert = () if entry.expert is None else (entry.expert,)
    starts = (start, *(0 for _ in shape[1:])) if shape else ()
    alone: list[Box] = []
    together: list[Box] = []
    for name in names_of(entry):
        key = name + suffix
        alone.append(
            Box(
                key=key,
                offsets=(*expert, *starts),
                sizes=(*(1 for _ in expert), *shape),
                whole=(*experts, *whole),
            )
        )
        if stacked and entry.layer is not None:
            assert _LAYER.match(key), key
            box = Box(
                key=_LAYER.sub("decoder.layers.", key),
                offsets=(entry.layer, *expert, *starts),
                sizes=(1, *(1 for _ in expert), *shape),
                whole=(table.facts.num_layers, *experts, *whole),
            )
            together.append(box)
    return (*together, *alone)


def names_of(entry: Entry) -> tuple[str, ...]:
    """Return the names of an entry in Megatron's checkpoints, first that of its local modules, with
    the layer's number; experts are rows of one tensor."""
    plain = _EXPERT.sub(".experts.", entry.megatron)
    mixer = "full" if entry.layer is None else entry.facts.layers[entry.layer].mixer
    fused = fused_names(plain, mixer=mixer)
    return (*fused, plain) if mixer in ("full", "sliding", "gated_delta") else (plain, *fused)


def can_stack(table: WeightTable) -> bool:
    """Return True if every layer of the decoder has the same tensors in the same shapes, so that
    they may be rows of stacked ones."""
    by_layer: dict[int, list[object]] = {}
    for entry in table.entries:
        if entry.layer is not None:
            name = _LAYER.sub("", entry.megatron)
            by_layer.setdefault(entry.layer, []).append(
                (name, megatron_shapes(entry.rule, entry.facts))
            )
    kinds = {layer.mixer for layer in table.facts.layers}
    one_family = kinds <= {"full", "sliding"} or len(kinds) == 1
    layers = list(by_layer.values())
    return (
        one_family
        and "mamba" not in kinds
        and len(layers) == table.facts.num_layers
        and all(layer == layers[0] for layer in layers)
    )


@lru_cache(maxsize=4096)
def megatron_shapes(
    rule: Rule, facts: ModelFacts
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return (shapes of the parts, shape of the Megatron tensor) for one layer or expert."""
    disk = [torch.empty(shape, device="meta") for shape in rule.shapes(facts)]
    parts = rule.to_parts(disk, facts)
    return tuple(tuple(part.shape) for part in parts), tuple(rule.fuse(parts, facts).shape)


def find_gap(boxes: Iterable[Box]) -> str | None:
    """Return the first key whose boxes overlap or leave a gap, and the fault; None if every key is
    covered exactly once."""
    by_key: dict[str, list[Box]] = {}
    for box in boxes:
        by_key.setdefault(box.key, []).append(box)
    for key, own in by_key.items():
        whole = own[0].whole
        if any(box.whole != whole for box in own):
            return f"`{key}` is said to have different shapes"
        if len({box.offsets for box in own}) != len(own):
            return f"`{key}` has two tensors in one place"
        if any(
            start + size > length
            for box in own
            for start, size, length in zip(box.offsets, box.sizes, whole, strict=True)
        ):
            return f"`{key}` has a tensor beyond its end"
        if why := _gap(key, own, whole):
            return why
    return None


def _gap(key: str, boxes: list[Box], whole: tuple[int, ...]) -> str | None:
    """Return the fault if, along some dim, a box does not end where the next begins."""
    if not whole:
        return None if len(boxes) == 1 else f"`{key}` has two tensors in one place"
    rows: dict[int, list[Box]] = {}
    for box in boxes:
        rows.setdefault(box.offsets[0], []).append(box)
    end = 0
    for start in sorted(rows):
        group = rows[start]
        if start != end:
            return f"`{key}` has a gap or an overlap at {start}"
        if len({box.sizes[0] for box in group}) != 1:
            return f"`{key}` has tensors of different sizes beside each other"
        end = start + group[0].sizes[0]
        inner = [
            Box(key=key, offsets=box.offsets[1:], sizes=box.sizes[1:], whole=box.whole[1:])
            for box in group
        ]
        if why := _gap(key, inner, whole[1:]):
            return why
    return None if end == whole[0] else f"`{key}` ends at {end} of {whole[0]}"
