"""Reads and writes `.metadata`, `common.pt` and `metadata.json` of a `torch_dist` checkpoint, which
locate the tensors, in the form of torch's own writer. Pickles are read by an unpickler that allows
only the classes it needs."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from milescli.checkpoint.base import METADATA_NAME
from milescli.checkpoint.torch_dist.framing import framing_sizes
from milescli.checkpoint.torch_dist.keys import Item
from milescli.core.errors import CheckpointError
from milescli.core.files import open_regular

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
)
_MAX_MEMO = 1_000_000
"""Most entries by which an index of a pickle's memo may exceed the existing ones."""
_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
}


class _ForbiddenClass(pickle.UnpicklingError):
    pass


class _Plain:
    """Stands for Megatron's own additions, which hold plans of its next save."""


_MEGATRONS = {
    ("megatron.core.dist_checkpointing.strategies.torch", name)
    for name in ("MCoreMetadata", "MCoreSavePlan")
}


def _enum_member(kind: object, name: object) -> Enum:
    """Return a member of one of torch's enums: before Python 3.11.4, and in no later one, pickles
    name it by `getattr`. Raises _ForbiddenClass for anything else."""
    is_enum = isinstance(kind, type) and issubclass(kind, Enum) and kind.__module__ in _MODULES
    if not is_enum or name not in kind.__members__:
        raise _ForbiddenClass("builtins.getattr")
    return kind[name]


class _PlainUnpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Unpickles plain data in pure Python: a single damaged byte makes the unpickler in C allocate
    tens of GB for its memo. What this one reads, Megatron's own reader in C may read, too."""

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def load_long_binput(self) -> None:
        number = int.from_bytes(self.read(4), "little")
        if number > _MAX_MEMO + len(self.memo):
            raise ValueError(f"its memo has a gap of {number:,}")
        self.memo[number] = self.stack[-1]

    dispatch[pickle.LONG_BINPUT[0]] = load_long_binput

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _MEGATRONS:
            return _Plain
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        named = (
            super().find_class(module, name)
            if (module, name) in _NAMES
            or module in _MODULES
            or (module == "torch" and "." not in name)
            else None
        )
        import torch

        plain = (module, name) in _NAMES or isinstance(
            named, torch.dtype | torch.layout | torch.memory_format
        )
        if not plain and not (isinstance(named, type) and named.__module__ in _MODULES):
            raise _ForbiddenClass(f"{module}.{name}")
        return named


def read_metadata(folder: Path) -> Metadata:
    """Read `.metadata`. Raises CheckpointError if there is none, if it holds anything but torch's
    own plain data, or if a file that torch and Megatron would open is no file."""
    path = folder / METADATA_NAME
    try:
        with open_regular(path) as file:
            metadata = _PlainUnpickler(file).load()
        if not hasattr(metadata, "state_dict_metadata"):
            raise _ForbiddenClass(type(metadata).__name__)
        _require_places(metadata)
    except OSError as error:
        raise CheckpointError(
            f"`{folder}` is not a checkpoint of the trainer",
            why=f"`{METADATA_NAME}` cannot be read: {error.strerror}",
            fix="miles resume RUN   # uses the newest complete checkpoint",
        ) from error
    except _ForbiddenClass as error:
        raise CheckpointError(
            f"the checkpoint `{folder}` is not safe to read",
            why=f"`{METADATA_NAME}` would load `{error}`, which the trainer never writes, so "
            "reading it could run foreign code",
            fix="use a checkpoint that you created",
        ) from error
    except Exception as error:  # a torn pickle may raise anything
        raise CheckpointError(
            f"the checkpoint `{folder}` is corrupt",
            why=f"`{METADATA_NAME}` cannot be read: {type(error).__name__}: {error}",
            fix="resume from another checkpoint of the run",
        ) from error
    _require_files(folder, metadata)
    return metadata


def _require_files(folder: Path, metadata: Metadata) -> None:
    """Raise CheckpointError if a path exists and is not a regular file: opening a FIFO would block
    for ever. Missing files are reported by the code that needs them."""
    names = {info.relative_path for info in (metadata.storage_data or {}).values()}
    for name in sorted({*names, COMMON_NAME, CONFIG_NAME}):
        try:
            open_regular(folder / name).close()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint `{folder}` is corrupt",
                why=f"`{name}` cannot be read: {error.strerror}",
                fix="resume from another checkpoint of the run",
            ) from error


def _require_places(metadata: Metadata) -> None:
    """Raise an error of any type if a field that the reader uses does not have the form that torch
    writes."""
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            boxes = [stored.size, *(box for c in stored.chunks for box in (c.offsets, c.sizes))]
            if not isinstance(stored.properties.dtype, torch.dtype) or not all(
                len(box) == len(stored.size) and _are_counts(box) for box in boxes
            ):
                raise ValueError(f"`{key}` has no shape")
    for index, info in (metadata.storage_data or {}).items():
        is_place = isinstance(info.relative_path, str) and _are_counts((info.offset, info.length))
        if not is_place or not (index.offset is None or _are_counts(index.offset)):
            raise ValueError(f"`{index.fqn}` has no place in a file")


def _are_counts(numbers: Iterable[object]) -> bool:
    return all(isinstance(number, int) and 0 <= number < 2**62 for number in numbers)


_OF_MODULE = re.compile(
    r"^(?!embedding\.)(.*?)\.(?:weight|bias|layer_norm_weight|layer_norm_bias)(?:\.\w+)?$"
)
COMMON_NAME = "common.pt"
CONFIG_NAME = "metadata.json"
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    """Locates an item in a file."""

    item: Item
    dtype: torch.dtype
    file: str
    """Name within the checkpoint."""
    offset: int
    """First byte of its frame."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of frame and data."""
        return framing_sizes(self.dtype, self.item.frame_shapes)[1]


def make_metadata(placed: Iterable[StoredItem], *, empty: tuple[str, int]) -> bytes:
    """Return the bytes of `.metadata`. `empty`: (file, bytes) of the one extra state that all
    modules share."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for place in placed:
        for key in extra_states(place.item):
            tensors[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = _StorageInfo(empty[0], 0, empty[1])
        shapes = place.item.frame_shapes
        spans = dict(zip(shapes, framing_sizes(place.dtype, shapes)[2], strict=True))
        for box in place.item.boxes:
            offsets, (start, length) = torch.Size(box.offsets), spans[box.sizes]
            if box.key not in tensors:
                tensors[box.key] = TensorStorageMetadata(
                    properties=TensorProperties(dtype=place.dtype),
                    size=torch.Size(box.whole),
                    chunks=[],
                )
            known = tensors[box.key]
            assert isinstance(known, TensorStorageMetadata), box.key
            chunks = known.chunks
            storage[MetadataIndex(box.key, offsets, len(chunks))] = _StorageInfo(
                place.file, place.offset + start, length
            )
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.sizes)))
    return pickle.dumps(
        Metadata(state_dict_metadata=tensors, storage_data=storage, storage_meta=StorageMeta())
    )


def extra_states(item: Item) -> Iterator[str]:
    """Yield the keys under which Megatron looks for the extra state of a tensor's module. Linear
    layers have one for TransformerEngine's, which store FP8 scales there; norms and attention of
    TransformerEngine have one, too."""
    for box in item.boxes:
        match = _OF_MODULE.match(box.key)
        if match is None:
            continue
        stacked = len(box.sizes) - len(item.shape)
        offsets, whole = box.offsets[:stacked] or (0,), box.whole[:stacked] or (1,)
        place = f"._extra_state/shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, whole))}"
        yield match[1] + place
        if match[1].endswith("self_attention.linear_proj"):
            yield match[1].removesuffix("linear_proj") + "core_attention" + place


def make_extra_state() -> bytes:
    """Return what Megatron saves for a module without extra state."""
    stream = io.BytesIO()
    torch.save([None], stream)
    return stream.getvalue()


def make_common() -> bytes:
    """Return the bytes of `common.pt`, which is empty: anything in it would appear among the
    weights when a bare model is loaded."""
    stream = io.BytesIO()
    torch.save({}, stream)
    return stream.getvalue()


def make_config() -> bytes:
    """Return the bytes of `metadata.json`."""
    return json.dumps(_CONFIG).encode()
