"""Converts a `torch_dist` checkpoint of any layout to the files of a Hugging Face folder: the plan,
and the tensors as they stream. Called by `conversion`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch

from milescli.checkpoint.hf_folder import SINGLE_NAME
from milescli.checkpoint.hf_tensors import HfTensors
from milescli.checkpoint.hf_to_megatron import open_passthrough, safetensors_file
from milescli.checkpoint.pipeline import Piece, PlannedFile, ranges_within
from milescli.checkpoint.record import (
    Record,
    copy_non_weights,
    read_record,
    record_of,
    write_plain_config,
)
from milescli.checkpoint.safetensors_file import TensorSpec, dtype_name
from milescli.checkpoint.source import Source, open_source
from milescli.checkpoint.torch_dist.keys import items_of
from milescli.checkpoint.torch_dist.reader import TorchDistReader
from milescli.checkpoint.torch_dist.weights import CheckpointWeights, single_boxes
from milescli.checkpoint.weight_files import INDEX_NAME
from milescli.core.errors import CheckpointError
from milescli.core.units import format_few
from milescli.models import load_facts
from milescli.models import table as table_of
from milescli.models.adapter import read_shape
from milescli.models.base import Entry, WeightTable

_OF_THE_MODEL = ("decoder.", "embedding.", "output_layer.", "mtp.", "encoder.", "vision.")


@dataclass(slots=True, kw_only=True)
class HfPlan:
    """Lists every file of the folder. Made from headers alone. Must be closed."""

    model_dir: Path
    table: WeightTable
    files: list[PlannedFile]
    tensors: list[TensorSpec]
    """All tensors, in order."""
    index: dict[str, object] | None
    """Content of the index file; None for a single file without one."""
    carried: list[str]
    """Tensors that are copied from the model's folder, as the checkpoint does not have them."""
    absent_mtp: list[str]
    """Tensors of MTP layers that config.json names, but neither checkpoint nor folder has."""
    rounded: dict[str, tuple[str, str]]
    """Name of a tensor -> (dtype in the checkpoint, narrower dtype that is written)."""
    dtypes_are_new: bool
    """True if the written dtypes differ from those of the model's folder, or if it had no weights.
    """
    num_keys_used: int
    units: dict[str, list[Entry]]
    """Name on disk -> its entries."""
    resources: ExitStack = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def write_small_files(self, folder: Path, *, dtype: torch.dtype | None) -> None:
        """Write the small files next to the planned ones: config.json, tokenizer, index. `dtype`:
        the requested dtype."""
        copy_non_weights(self.model_dir, folder)
        write_plain_config(folder, dtype=self._new_dtype(dtype))
        if self.index is not None:
            text = json.dumps(self.index, indent=2, sort_keys=True) + "\n"
            (folder / INDEX_NAME).write_text(text, encoding="utf-8")

    def _new_dtype(self, requested: torch.dtype | None) -> str | None:
        """Return the dtype that config.json must name; None if it need not change."""
        if requested is not None:
            return str(requested).removeprefix("torch.")
        written = {
            str(spec.dtype).removeprefix("torch.")
            for spec in self.tensors
            if spec.dtype.is_floating_point
        }
        config_dtype = load_facts(self.model_dir).dtype
        if self.dtypes_are_new and len(written) == 1 and config_dtype not in written:
            return written.pop()
        return None

    def close(self) -> None:
        """Close the open files. Idempotent."""
        self.resources.close()

    def __enter__(self) -> HfPlan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def plan_hf(
    checkpoint: Path, model_dir: Path, *, dtype: torch.dtype | None, shard_bytes: int | None
) -> HfPlan:
    """Plan the content of every file. `model_dir`: has config.json, and perhaps the weights (or the
    record of them) from which the checkpoint was converted. `dtype`: of all floating-point weights;
    None: as in the model, or else as in the checkpoint. `shard_bytes` None: files as in the model.
    Raises CheckpointError if checkpoint and model do not belong together."""
    if read_shape(checkpoint) is not None:
        raise CheckpointError(
            f"`{checkpoint}` contains only an adapter",
            why="a run with train.lora.rank does not save its base model",
            fix=["miles export RUN --to DIR   # a PEFT folder", "--merge   # in its base model"],
        )
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
) -> HfPlan:
    table = table_of(load_facts(model_dir))
    reader = resources.enter_context(TorchDistReader(checkpoint))
    reader.drops_cache = True
    record, base = _open_base(model_dir, resources)
    recorded = record.dtypes if record is not None else {}
    if record is not None:
        table = table.as_on_disk(recorded, record.shape)
    weights = HfTensors(CheckpointWeights(reader, table), base, tied=_tied_copies(record, table))
    _require_explained(reader, table, checkpoint)
    wanted, absent_mtp = _names(weights, base, list(recorded) if record is not None else None)
    tensors, carried, rounded = [], [], {}
    for name in wanted:
        spec = weights.spec(name, dtype=dtype, recorded=recorded.get(name))
        tensors.append(spec)
        if weights.is_carried(name):
            carried.append(name)
        elif (stored := weights.stored_dtype(name)).itemsize > spec.dtype.itemsize:
            rounded[name] = (dtype_name(stored), dtype_name(spec.dtype))
    if (
        record is not None
        and record.files
        and shard_bytes is None
        and len(tensors) == len(recorded)
    ):
        files, index = _recorded_files(record, tensors, weights)
    else:
        files, index = _fresh_files(tensors, weights, shard_bytes=shard_bytes or 5 * 10**9)
    return HfPlan(
        model_dir=model_dir,
        table=table,
        files=files,
        tensors=tensors,
        index=index,
        carried=carried,
        absent_mtp=absent_mtp
        if record is None or any(name in recorded for name in absent_mtp)
        else [],
        rounded=rounded,
        dtypes_are_new=record is None
        or any(recorded.get(spec.name) != dtype_name(spec.dtype) for spec in tensors),
        num_keys_used=len(weights.keys()),
        units=weights.units,
        resources=resources,
    )


def _names(
    weights: HfTensors, base: Source | None, recorded: list[str] | None
) -> tuple[list[str], list[str]]:
    """Return (names of all tensors to write, in order; names of tensors of MTP layers that neither
    checkpoint nor folder has). `recorded`: names in the folder from which the checkpoint was
    converted."""
    names = list(weights.units) if recorded is None else recorded
    known = set(names)
    absent_mtp = [
        name
        for name, entries in weights.units.items()
        if entries[0].mtp is not None
        and (name not in known or not weights.in_checkpoint(entries[0]))
        and name not in (base or ())
    ]
    # the record may be of a folder that lacked tensors, or named them otherwise: they are weights
    # all the same
    lost = [
        name
        for name, entries in weights.units.items()
        if entries[0].mtp is None and name not in known
    ]
    left_out = set(absent_mtp)
    return [name for name in (*names, *lost) if name not in left_out], absent_mtp


def _open_base(model_dir: Path, resources: ExitStack) -> tuple[Record | None, Source | None]:
    """Return (the layout of the model's folder, its tensors)."""
    record = read_record(model_dir)
    if record is not None:
        carried = open_passthrough(model_dir)
        return record, resources.enter_context(carried) if carried else None
    if not any(model_dir.glob("*.safetensors")):
        return None, None
    source = resources.enter_context(open_source(model_dir))
    return record_of(source), source


def _tied_copies(record: Record | None, table: WeightTable) -> set[str]:
    """Return the output layers of the model's folder that repeat its tied embedding."""
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
        shown = format_few([f"`{key}`" for key in extra], 3)
        raise CheckpointError(
            f"the checkpoint `{checkpoint}` belongs to another model",
            why=f"it has {shown}, which config.json does not explain, and miles never drops a "
            "weight silently",
            fix="use the model that the checkpoint was made from",
        )


def _file(
    name: str,
    specs: Sequence[TensorSpec],
    weights: HfTensors,
    metadata: dict[str, str] | None = None,
) -> PlannedFile:
    def make() -> Iterator[Piece]:
        return chain.from_iterable(map(weights.pieces, specs))

    return safetensors_file(name, specs, make, metadata=metadata)


def _recorded_files(
    record: Record, tensors: Sequence[TensorSpec], weights: HfTensors
) -> tuple[list[PlannedFile], dict[str, object] | None]:
    by_name = {spec.name: spec for spec in tensors}
    files = [
        _file(file.name, [by_name[name] for name in file.tensors], weights, file.metadata)
        for file in record.files
    ]
    if record.index is None:
        return files, None
    weight_map = {name: file.name for file in record.files for name in file.tensors}
    return files, _index(weight_map, tensors, metadata=record.index)


def _fresh_files(
    tensors: Sequence[TensorSpec], weights: HfTensors, *, shard_bytes: int
) -> tuple[list[PlannedFile], dict[str, object] | None]:
    shards = [
        [tensors[place] for place in within]
        for within in ranges_within((spec.num_bytes for spec in tensors), limit=shard_bytes)
    ]
    if len(shards) == 1:
        return [_file(SINGLE_NAME, shards[0], weights)], None
    names = [
        f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))
    ]
    files = [_file(name, shard, weights) for name, shard in zip(names, shards, strict=True)]
    weight_map = {
        spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard
    }
    return files, _index(weight_map, tensors, metadata={})


def _index(
    weight_map: dict[str, str], tensors: Sequence[TensorSpec], *, metadata: dict[str, object]
) -> dict[str, object]:
    """Return the index as transformers writes it."""
    total = sum(spec.num_bytes for spec in tensors)
    return {"metadata": {**metadata, "total_size": total}, "weight_map": weight_map}
