"""Reads tensors, or boxes of them, from a `torch_dist` checkpoint of any layout, without Megatron
or a process group, and only the requested parts. Called by convert, export, evaluation and the
trainer's load."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from milescli.checkpoint.files import read_exactly, read_region
from milescli.checkpoint.torch_dist.framing import READ_AHEAD, Frame, NotFramed, parse_frame
from milescli.checkpoint.torch_dist.metadata import CONFIG_NAME, read_metadata
from milescli.core.errors import CheckpointError
from milescli.core.files import read_json

_OPEN_FILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Describes a stored piece of a key."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    whole: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[_Chunk]
    starts: np.ndarray
    """[chunks, dims]"""
    ends: np.ndarray


class TorchDistReader:
    """Reads tensors of a checkpoint folder. A context manager. Its CheckpointErrors name key and
    file."""

    def __init__(self, folder: Path) -> None:
        """Open the folder. Raises CheckpointError if it is no checkpoint, or its metadata are not
        torch's own plain data."""
        self.folder = folder
        self.drops_cache = False
        """What was read is forgotten by the page cache."""
        self._metadata: Metadata = read_metadata(folder)
        _require_torch_dist(folder)
        self._keys: dict[str, _Key] = {}
        self._files: OrderedDict[str, int] = OrderedDict()
        self._frames: dict[tuple[str, int], Frame] = {}
        self._places: dict[str, dict[tuple[int, ...], object]] = {}
        for index, info in (self._metadata.storage_data or {}).items():
            if index.offset is not None:
                self._places.setdefault(index.fqn, {})[tuple(index.offset)] = info

    def __enter__(self) -> TorchDistReader:
        return self

    def __exit__(self, *exc: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __contains__(self, key: str) -> bool:
        return isinstance(self._metadata.state_dict_metadata.get(key), TensorStorageMetadata)

    def names(self) -> list[str]:
        """Return the keys of all tensors."""
        return [key for key in self._metadata.state_dict_metadata if key in self]

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(self._metadata.state_dict_metadata[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype in the metadata."""
        return self._metadata.state_dict_metadata[key].properties.dtype

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Read the box at `offsets` of `sizes`, in the dtype of its first stored piece."""
        stored = self._key(key)
        start, end = (
            np.array(offsets, dtype=np.int64),
            np.array(offsets, dtype=np.int64) + np.array(sizes, dtype=np.int64),
        )
        if stored.whole:
            touched = ((stored.starts < end) & (stored.ends > start)).all(axis=1).nonzero()[0]
        else:
            touched = np.arange(len(stored.chunks))
        chunks = [stored.chunks[number] for number in touched]
        if not chunks:
            raise self._corrupt_error(key, f"no piece of it covers {list(offsets)}")
        out: torch.Tensor | None = None
        covered = 0
        for chunk in chunks:
            low = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            frame = self._frame(key, chunk)
            if out is None:
                out = torch.empty(tuple(sizes), dtype=frame.dtype)
            inside = tuple(slice(a - b, c - b) for a, b, c in zip(low, offsets, high, strict=True))
            ranges = [(a - b, c - b) for a, b, c in zip(low, chunk.offsets, high, strict=True)]
            self._read_chunk(key, chunk, frame, ranges, out[inside])
            covered += math.prod(c - a for a, c in zip(low, high, strict=True))
        assert out is not None
        if covered != math.prod(sizes):
            raise self._corrupt_error(
                key,
                f"its pieces hold {covered} of the {math.prod(sizes)} numbers at {list(offsets)}",
            )
        return out

    def _read_chunk(
        self,
        key: str,
        chunk: _Chunk,
        frame: Frame,
        ranges: list[tuple[int, int]],
        out: torch.Tensor,
    ) -> None:
        file = self._open(key, chunk.file)
        begin = chunk.begin + frame.data_offset
        try:
            if not frame.is_contiguous:
                out.copy_(
                    self._strided(file, begin, frame)[tuple(slice(*bounds) for bounds in ranges)]
                )
            elif out.is_contiguous() and out.dtype is frame.dtype:
                read_region(file, begin, frame.shape, ranges, out, drop_cache=self.drops_cache)
            else:
                piece = torch.empty(out.shape, dtype=frame.dtype)
                read_region(file, begin, frame.shape, ranges, piece, drop_cache=self.drops_cache)
                out.copy_(piece)
        except (OSError, EOFError, ValueError, OverflowError, RuntimeError) as error:
            raise self._corrupt_error(key, f"`{chunk.file}`: {error}") from error

    def _strided(self, file: int, begin: int, frame: Frame) -> torch.Tensor:
        count = 1 + sum(
            (length - 1) * stride for length, stride in zip(frame.shape, frame.strides, strict=True)
        )
        flat = torch.empty(count, dtype=frame.dtype)
        read_exactly(file, flat.view(torch.uint8), offset=begin, drop_cache=self.drops_cache)
        return flat.as_strided(frame.shape, frame.strides)

    def _key(self, key: str) -> _Key:
        if key in self._keys:
            return self._keys[key]
        stored = self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(
                f"the checkpoint `{self.folder}` lacks `{key}`",
                why="config.json says that the model has it, so the checkpoint belongs to "
                "another model",
                fix="use the model that the checkpoint was made from",
            )
        places, chunks = self._places.get(key, {}), []
        for chunk in stored.chunks:
            info = places.get(tuple(chunk.offsets))
            if info is None:
                raise self._corrupt_error(
                    key, f"the metadata do not say where its piece at {list(chunk.offsets)} is"
                )
            if getattr(info, "transform_descriptors", None):
                raise self._corrupt_error(
                    key,
                    f"its pieces are transformed by {info.transform_descriptors}, which is not "
                    "read here",
                )
            chunks.append(
                _Chunk(
                    offsets=tuple(chunk.offsets),
                    sizes=tuple(chunk.sizes),
                    file=info.relative_path,
                    begin=info.offset,
                    length=info.length,
                )
            )
        starts = np.array([chunk.offsets for chunk in chunks], dtype=np.int64).reshape(
            len(chunks), -1
        )
        sizes = np.array([chunk.sizes for chunk in chunks], dtype=np.int64).reshape(len(chunks), -1)
        whole = tuple(stored.size)
        if int(sizes.prod(axis=1).sum()) != math.prod(whole):
            raise self._corrupt_error(
                key,
                f"its pieces hold {int(sizes.prod(axis=1).sum())} numbers, and it has "
                f"{math.prod(whole)}",
            )
        entry = _Key(
            whole=whole,
            dtype=stored.properties.dtype,
            chunks=chunks,
            starts=starts,
            ends=starts + sizes,
        )
        self._keys[key] = entry
        return entry

    def _frame(self, key: str, chunk: _Chunk) -> Frame:
        place = (chunk.file, chunk.begin)
        if place in self._frames:
            return self._frames[place]
        file = self._open(key, chunk.file)

        def read(offset: int, length: int) -> bytes:
            return os.pread(file, length, chunk.begin + offset)

        try:
            near = min(READ_AHEAD, chunk.length)
            frame = parse_frame(
                read(0, near), read(chunk.length - near, near), size=chunk.length, read=read
            )
        except (OSError, NotFramed) as error:
            raise self._corrupt_error(
                key, f"`{chunk.file}` at byte {chunk.begin}: {error}"
            ) from error
        if frame.shape != chunk.sizes:
            raise self._corrupt_error(
                key,
                f"`{chunk.file}` holds {list(frame.shape)}, and the metadata say "
                f"{list(chunk.sizes)}",
            )
        self._frames[place] = frame
        return frame

    def _open(self, key: str, name: str) -> int:
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name]
        if Path(name).name != name:
            raise self._corrupt_error(key, f"`{name}` lies outside the folder")
        try:
            self._files[name] = os.open(self.folder / name, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise self._corrupt_error(
                key, f"`{name}` cannot be opened: {error.strerror}"
            ) from error
        if len(self._files) > _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        return self._files[name]

    def _corrupt_error(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint `{self.folder}` is corrupt",
            why=f"`{key}` cannot be read: {why}",
            fix="use another checkpoint of the run, or download this one again",
        )


def _require_torch_dist(folder: Path) -> None:
    path = folder / CONFIG_NAME
    if not path.exists():
        return
    try:
        backend = read_json(path).get("sharded_backend")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint `{folder}` is corrupt",
            why=f"`{CONFIG_NAME}` cannot be read: {error}",
            fix="use another checkpoint of the run",
        ) from error
    if backend != "torch_dist":
        raise CheckpointError(
            f"the checkpoint `{folder}` has another format",
            why=f"its tensors are stored as `{backend}`, but only `torch_dist` is supported",
            fix="save it with Megatron's `--ckpt-format torch_dist`",
        )
