"""A `torch_dist` checkpoint of any layout -> files of a Hugging Face folder: what goes where, and
the tensors as they stream by. The runtime's convert calls it."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from milescli.checkpoint.finite import require_finite
from milescli.checkpoint.hf_folder import INDEX_NAME, SINGLE_NAME
from milescli.checkpoint.hf_to_megatron import open_passthrough, safetensors_file
from milescli.checkpoint.pipeline import Piece, PlannedFile, bounded
from milescli.checkpoint.record import Record, read_record, record_of
from milescli.checkpoint.safetensors_file import Laid, dtype_name, torch_dtype
from milescli.checkpoint.source import Source, open_source
from milescli.checkpoint.torch_dist.keys import Box, items_of
from milescli.checkpoint.torch_dist.reader import TorchDistReader
from milescli.checkpoint.torch_dist.weights import CheckpointWeights, single_boxes
from milescli.core.errors import CheckpointError
from milescli.models import load_facts
from milescli.models import table as table_of
from milescli.models.base import Entry, WeightTable

_CACHE_BYTES = 128 * 2**20
"""Disk tensors of entries that hold several, until their turn comes."""
_OF_THE_MODEL = ("decoder.", "embedding.", "output_layer.", "mtp.", "encoder.")
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(slots=True, kw_only=True)
class Outlet:
    """Everything that will be written. Close it."""

    checkpoint: Path
    model_dir: Path
    table: WeightTable
    files: list[PlannedFile]
    laid: list[Laid]
    """Every tensor, in order."""
    index: dict[str, object] | None
    """Of the index file; None where there is one file without."""
    carried: list[str]
    """Tensors that are not in the checkpoint, and came from the model's folder."""
    absent_mtp: list[str]
    """Tensors of MTP layers that config.json names, and neither has."""
    rounded: dict[str, tuple[str, str]]
    """Name of a tensor -> (dtype in the checkpoint, narrower dtype that is written)."""
    dtypes_are_new: bool
    """What is written has other dtypes than the model's folder had, or it had no weights."""
    num_keys_used: int
    units: dict[str, list[Entry]]
    """Name on disk -> its entries."""
    resources: ExitStack = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)

    def close(self) -> None:
        """Idempotent."""
        self.resources.close()

    def __enter__(self) -> Outlet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def plan_outlet(
    checkpoint: Path, model_dir: Path, *, dtype: torch.dtype | None, shard_bytes: int | None
) -> Outlet:
    """Decide what goes where. `model_dir`: a folder with config.json, and perhaps with the weights
    (or the record of them) that the checkpoint began from. `dtype` of all floating-point weights;
    None: as the model had them, or as the checkpoint has them. `shard_bytes`: None: files as the
    model had them. Raises CheckpointError where checkpoint and model do not belong together."""
    resources = ExitStack()
    try:
        return _plan(
            checkpoint, model_dir, dtype=dtype, shard_bytes=shard_bytes, resources=resources
        )
    except BaseException:
        resources.close()
        raise


def _plan(
    checkpoint: Path,
    model_dir: Path,
    *,
    dtype: torch.dtype | None,
    shard_bytes: int | None,
    resources: ExitStack,
) -> Outlet:
    table = table_of(load_facts(model_dir))
    reader = resources.enter_context(TorchDistReader(checkpoint))
    reader.drops_behind = True
    record, beside = _base(model_dir, resources)
    if record is not None:
        table = table.as_on_disk(record.dtypes)
    maker = _Maker(CheckpointWeights(reader, table), beside, tied=_tied_copies(record, table))
    wanted = list(record.dtypes) if record is not None else list(maker.weights.units)
    _require_explained(reader, table, checkpoint)
    laid, carried, rounded = [], [], {}
    names = set(wanted)
    absent = [
        name
        for name, entries in maker.weights.units.items()
        if name not in names or not _there(maker, entries)
    ]
    lost = [
        name for name in absent if maker.weights.units[name][0].mtp is None and name not in names
    ]
    # the record is of a folder that lacked them, or named them otherwise: they are weights all the
    # same
    wanted += lost
    absent_mtp = [
        name
        for name in absent
        if maker.weights.units[name][0].mtp is not None and name not in (beside or ())
    ]
    for name in wanted:
        if name in absent_mtp:
            continue
        each = maker.lay(
            name, dtype=dtype, recorded=record.dtypes.get(name) if record is not None else None
        )
        laid.append(each)
        if maker.is_carried(name):
            carried.append(name)
        elif (found := maker.stored_dtype(name)).itemsize > each.dtype.itemsize:
            rounded[name] = (dtype_name(found), dtype_name(each.dtype))
    as_recorded = (
        record is not None
        and bool(record.files)
        and shard_bytes is None
        and len(laid) == len(record.dtypes)
    )
    if as_recorded:
        assert record is not None
        files, index = _recorded_files(record, laid, maker)
    else:
        files, index = _fresh_files(laid, maker, shard_bytes=shard_bytes or 5 * 10**9)
    return Outlet(
        checkpoint=checkpoint,
        model_dir=model_dir,
        table=table,
        files=files,
        laid=laid,
        index=index,
        carried=carried,
        absent_mtp=absent_mtp
        if record is None or any(name in names for name in absent_mtp)
        else [],
        rounded=rounded,
        dtypes_are_new=record is None
        or any(record.dtypes.get(each.name) != dtype_name(each.dtype) for each in laid),
        num_keys_used=len(maker.keys()),
        units=maker.weights.units,
        resources=resources,
    )


def _there(maker: _Maker, entries: Sequence[Entry]) -> bool:
    return entries[0].mtp is None or maker.weights.has(entries[0])


def _base(model_dir: Path, resources: ExitStack) -> tuple[Record | None, Source | None]:
    """(what the model's folder looked like, tensors that it has)"""
    record = read_record(model_dir)
    if record is not None:
        beside = open_passthrough(model_dir)
        return record, resources.enter_context(beside) if beside else None
    if not any(model_dir.glob("*.safetensors")):
        return None, None
    source = resources.enter_context(open_source(model_dir))
    return record_of(source), source


def _tied_copies(record: Record | None, table: WeightTable) -> set[str]:
    """Output layers of the model's folder that repeat its tied embedding."""
    if record is None or not table.facts.tied_embeddings:
        return set()
    known = table.hf_shapes()
    return {
        name
        for name in record.dtypes
        if name.endswith("lm_head.weight")
        and name not in known
        and not table.is_passthrough(name)
        and not table.is_ignored(name)
    }


def _require_explained(reader: TorchDistReader, table: WeightTable, checkpoint: Path) -> None:
    known = {
        box.key
        for entry in table.entries
        for item in items_of(entry, table, stacked=True)
        for box in (*item.boxes, *single_boxes(item))
    }
    extra = sorted(
        key for key in reader.names() if key.startswith(_OF_THE_MODEL) and key not in known
    )
    if table.facts.tied_embeddings:
        extra = [key for key in extra if key != "output_layer.weight"]
    if extra:
        shown = ", ".join(f"`{key}`" for key in extra[:3]) + (
            f" and {len(extra) - 3} more" if len(extra) > 3 else ""
        )
        raise CheckpointError(
            f"the checkpoint `{checkpoint}` is of another model",
            why=f"it has {shown}, which config.json does not explain, and no weight is dropped in "
            "silence",
            fix="give the model that the checkpoint was made of",
        )


class _Maker:
    """Gives tensors by their name on disk."""

    def __init__(
        self, weights: CheckpointWeights, beside: Source | None, *, tied: set[str]
    ) -> None:
        self.weights, self._beside, self._tied = weights, beside, tied
        self._shapes = weights.table.hf_shapes()
        self._cache: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()
        self._embedding = weights.table.by_megatron[_EMBEDDING].hf[0]

    def is_carried(self, name: str) -> bool:
        """Whether it comes from the model's folder."""
        if name in self._tied:
            return False
        entries = self.weights.units.get(name)
        return entries is None or not _there(self, entries)

    def stored_dtype(self, name: str) -> torch.dtype:
        """In the checkpoint."""
        return self.weights.dtype(self.weights.units[self._own(name)][0])

    def _own(self, name: str) -> str:
        return self._embedding if name in self._tied else name

    def lay(self, name: str, *, dtype: torch.dtype | None, recorded: str | None) -> Laid:
        """How it will be written."""
        if self.is_carried(name):
            if self._beside is None or name not in self._beside:
                raise CheckpointError(
                    f"`{name}` is nowhere to be had",
                    why="the model's folder had it, Megatron has no place for it, and the tensors "
                    "that were carried along are gone",
                    fix="--model FOLDER   # the Hugging Face folder that the checkpoint began from",
                )
            return Laid(name=name, dtype=self._beside.dtype(name), shape=self._beside.shape(name))
        entry = self.weights.units[self._own(name)][0]
        stored = self.weights.dtype(entry)
        target = stored if recorded is None else torch_dtype(recorded)
        if dtype is not None and stored.is_floating_point and not entry.rule.float32:
            target = dtype
        return Laid(name=name, dtype=target, shape=self._shapes[self._own(name)])

    def keys(self) -> set[str]:
        """Keys of the checkpoint that are read."""
        reader, found = self.weights.reader, set()
        for entry in self.weights.table.entries:
            for item in items_of(entry, self.weights.table, stacked=True):
                boxes: list[Box] = [*item.boxes, *single_boxes(item)]
                found |= {box.key for box in boxes if box.key in reader}
        return found

    def pieces(self, laid: Laid) -> Iterator[Piece]:
        """Whole, or row by row."""
        if self.is_carried(laid.name):
            assert self._beside is not None
            yield Piece(name=laid.name, tensor=self._beside.read(laid.name))
            return
        name = self._own(laid.name)
        entries = self.weights.units[name]
        for entry in entries:
            tensor = self._take(entry, name) if len(entry.hf) > 1 else self.weights.disk(entry)[0]
            shown = name if entry.row is None else f"{name}[{entry.row}]"
            require_finite(tensor, name=shown, where=f"`{self.weights.reader.folder}`")
            if tensor.dtype is not laid.dtype:
                tensor = tensor.to(laid.dtype)
                require_finite(tensor, name=shown, where=f"{laid.dtype}, which cannot hold it")
            yield Piece(name=shown, tensor=tensor)

    def _take(self, entry: Entry, name: str) -> torch.Tensor:
        """One of an entry's tensors; the others wait for their turn, if they are not many."""
        held = self._cache.pop(entry.megatron, None)
        if held is None or name not in held:
            held = dict(zip(entry.hf, self.weights.disk(entry), strict=True))
        found = held.pop(name)
        if held:
            # views would keep the whole tensor that they were cut from
            self._cache[entry.megatron] = held
            while self._cached_bytes() > _CACHE_BYTES and self._cache:
                self._cache.popitem(last=False)
        return found

    def _cached_bytes(self) -> int:
        return sum(tensor.nbytes for held in self._cache.values() for tensor in held.values())


def _file(
    name: str, laid: Sequence[Laid], maker: _Maker, metadata: dict[str, str] | None = None
) -> PlannedFile:
    def make() -> Iterator[Piece]:
        for each in laid:
            yield from maker.pieces(each)

    return safetensors_file(name, laid, make, metadata=metadata)


def _recorded_files(
    record: Record, laid: Sequence[Laid], maker: _Maker
) -> tuple[list[PlannedFile], dict[str, object] | None]:
    by_name = {each.name: each for each in laid}
    files = [
        _file(file.name, [by_name[name] for name in file.tensors], maker, file.metadata)
        for file in record.files
    ]
    if record.index is None:
        return files, None
    weight_map = {name: file.name for file in record.files for name in file.tensors}
    return files, _index(weight_map, laid, metadata=record.index)


def _fresh_files(
    laid: Sequence[Laid], maker: _Maker, *, shard_bytes: int
) -> tuple[list[PlannedFile], dict[str, object] | None]:
    shards = [
        [laid[place] for place in within]
        for within in bounded((each.num_bytes for each in laid), limit=shard_bytes)
    ]
    if len(shards) == 1:
        return [_file(SINGLE_NAME, shards[0], maker)], None
    names = [
        f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))
    ]
    weight_map = {
        each.name: name for name, shard in zip(names, shards, strict=True) for each in shard
    }
    return [_file(name, shard, maker) for name, shard in zip(names, shards, strict=True)], _index(
        weight_map, laid, metadata={}
    )


def _index(
    weight_map: dict[str, str], laid: Sequence[Laid], *, metadata: dict[str, object]
) -> dict[str, object]:
    total = sum(each.num_bytes for each in laid)
    return {"metadata": {**metadata, "total_size": total}, "weight_map": weight_map}


def write_index(folder: Path, index: dict[str, object]) -> None:
    """As transformers writes it."""
    (folder / INDEX_NAME).write_text(
        json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
