"""`.metadata`, `common.pt` and `metadata.json` of a `torch_dist` checkpoint: which tensor lies where. As torch's own writer makes them."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from milescli.checkpoint.torch_dist.framing import framing_sizes
from milescli.checkpoint.torch_dist.keys import Item

COMMON_NAME = "common.pt"
CONFIG_NAME = "metadata.json"
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_COMMON = {"checkpoint_version": 3.0, "iteration": 0}
"""What Megatron-LM asks of a checkpoint beside tensors: 3.0 is the order of query, key and value that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An item in a file."""

    item: Item
    dtype: torch.dtype
    file: str
    """Name within the checkpoint."""
    offset: int
    """First byte of its frame."""

    @property
    def data_offset(self) -> int:
        """First byte of the tensor."""
        return self.offset + framing_sizes(self.dtype, self.item.frame_shapes)[0]

    @property
    def num_bytes(self) -> int:
        """Frame and data."""
        return framing_sizes(self.dtype, self.item.frame_shapes)[1]


def make_metadata(placed: Iterable[Placed]) -> bytes:
    """`.metadata`"""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for each in placed:
        shapes = each.item.frame_shapes
        spans = dict(zip(shapes, framing_sizes(each.dtype, shapes)[2], strict=True))
        for box in each.item.boxes:
            offsets, (start, length) = torch.Size(box.offsets), spans[box.sizes]
            if box.key not in tensors:
                tensors[box.key] = TensorStorageMetadata(
                    properties=TensorProperties(dtype=each.dtype), size=torch.Size(box.whole), chunks=[]
                )
            chunks = tensors[box.key].chunks
            storage[MetadataIndex(box.key, offsets, len(chunks))] = _StorageInfo(each.file, each.offset + start, length)
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.sizes)))
    return pickle.dumps(Metadata(state_dict_metadata=tensors, storage_data=storage, storage_meta=StorageMeta()))


def make_common(content: Mapping[str, object]) -> bytes:
    """`common.pt`"""
    stream = io.BytesIO()
    torch.save({**_COMMON, **content}, stream)
    return stream.getvalue()


def make_config() -> bytes:
    """`metadata.json`"""
    return json.dumps(_CONFIG).encode()
