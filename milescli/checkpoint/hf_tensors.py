"""Makes the tensors of a Hugging Face folder, by their names there, from a `torch_dist` checkpoint
and from the folder from which it was converted. Called by `megatron_to_hf`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch

from milescli.checkpoint.pipeline import Piece
from milescli.checkpoint.safetensors_file import TensorSpec, torch_dtype
from milescli.checkpoint.source import Source, require_finite
from milescli.checkpoint.torch_dist.keys import Box, items_of
from milescli.checkpoint.torch_dist.weights import CheckpointWeights, single_boxes
from milescli.core.errors import CheckpointError
from milescli.models.base import Entry

_CACHE_BYTES = 128 * 2**20
"""Bytes of disk tensors that wait for their turn, if an entry has several."""
_EMBEDDING = "embedding.word_embeddings.weight"


class HfTensors:
    """Makes tensors by their names on disk."""

    def __init__(self, weights: CheckpointWeights, base: Source | None, *, tied: set[str]) -> None:
        """Combine the checkpoint's weights with `base`, the tensors of the model's folder. `tied`:
        names that repeat the embedding."""
        self.units = weights.units
        self._weights, self._base, self._tied = weights, base, tied
        self._shapes = weights.table.hf_shapes()
        self._cache: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()
        self._embedding = weights.table.by_megatron[_EMBEDDING].hf[0]

    def in_checkpoint(self, entry: Entry) -> bool:
        """Return True if the checkpoint holds the entry; MTP layers may be missing."""
        return entry.mtp is None or self._weights.has(entry)

    def is_carried(self, name: str) -> bool:
        """Return True if the tensor comes from the model's folder."""
        if name in self._tied:
            return False
        entries = self.units.get(name)
        return entries is None or not self.in_checkpoint(entries[0])

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the checkpoint."""
        return self._weights.dtype(self.units[self._checkpoint_name(name)][0])

    def _checkpoint_name(self, name: str) -> str:
        return self._embedding if name in self._tied else name

    def spec(self, name: str, *, dtype: torch.dtype | None, recorded: str | None) -> TensorSpec:
        """Return how the tensor will be written. Raises CheckpointError if neither checkpoint nor
        folder has it."""
        if self.is_carried(name):
            if self._base is None or name not in self._base:
                raise CheckpointError(
                    f"`{name}` cannot be found",
                    why="the model's folder had this tensor, Megatron does not store it, and "
                    "the tensors that were carried along are gone",
                    fix="--model FOLDER   # the Hugging Face folder that the checkpoint started "
                    "from",
                )
            return TensorSpec(name=name, dtype=self._base.dtype(name), shape=self._base.shape(name))
        entry = self.units[self._checkpoint_name(name)][0]
        stored = self._weights.dtype(entry)
        target = stored if recorded is None else torch_dtype(recorded)
        if dtype is not None and stored.is_floating_point and not entry.rule.float32:
            target = dtype
        return TensorSpec(name=name, dtype=target, shape=self._shapes[self._checkpoint_name(name)])

    def keys(self) -> set[str]:
        """Return the keys of the checkpoint that will be read."""
        reader, keys = self._weights.reader, set()
        for entry in self._weights.table.entries:
            for item in items_of(entry, self._weights.table, stacked=True):
                boxes: list[Box] = [*item.boxes, *single_boxes(item)]
                keys |= {box.key for box in boxes if box.key in reader}
        return keys

    def pieces(self, spec: TensorSpec) -> Iterator[Piece]:
        """Yield the tensor, whole or row by row."""
        if self.is_carried(spec.name):
            assert self._base is not None
            yield Piece(name=spec.name, tensor=self._base.read(spec.name))
            return
        name = self._checkpoint_name(spec.name)
        for entry in self.units[name]:
            whole = len(entry.hf) == 1
            tensor = self._weights.disk(entry)[0] if whole else self._take(entry, name)
            shown = name if entry.row is None else f"{name}[{entry.row}]"
            require_finite(tensor, name=shown, where=f"`{self._weights.reader.folder}`")
            if tensor.dtype is not spec.dtype:
                tensor = tensor.to(spec.dtype)
                require_finite(tensor, name=shown, where=f"{spec.dtype}, which cannot hold it")
            yield Piece(name=shown, tensor=tensor)

    def _take(self, entry: Entry, name: str) -> torch.Tensor:
        """Return one of an entry's tensors; cache the others, if they are small enough, until they
        are requested."""
        cached = self._cache.pop(entry.megatron, None)
        if cached is None or name not in cached:
            cached = dict(zip(entry.hf, self._weights.disk(entry), strict=True))
        tensor = cached.pop(name)
        if cached:
            # views would keep the whole tensor that they were cut from
            self._cache[entry.megatron] = cached
            while self._cached_bytes() > _CACHE_BYTES and self._cache:
                self._cache.popitem(last=False)
        return tensor

    def _cached_bytes(self) -> int:
        return sum(tensor.nbytes for cached in self._cache.values() for tensor in cached.values())
