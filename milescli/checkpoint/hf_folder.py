"""Weights of a Hugging Face folder: reads parts of tensors from safetensors, and writes tensors in
shards with an index. No vendor."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from safetensors.torch import save_file

from milescli.checkpoint.safetensors_file import DOWNLOAD_AGAIN, SafetensorsFile, TensorLocation
from milescli.checkpoint.weight_files import INDEX_NAME, file_by_tensor, weight_file_names
from milescli.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SINGLE_NAME = "model.safetensors"


class RegionReader(ABC):
    """Reads whole tensors, ranges and rows with the subclass's `read_region`. A context manager."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor. Raises CheckpointError if there is none with that
        name."""

    @abstractmethod
    def read_region(self, name: str, *ranges: tuple[int, int]) -> torch.Tensor:
        """Read [start:end along every dim] of a tensor; a scalar has no range."""

    def read(
        self, name: str, *, dim: int = 0, start: int = 0, end: int | None = None
    ) -> torch.Tensor:
        """Read [..., start:end along `dim` (0 or 1), ...] of a tensor."""
        ranges = [(0, length) for length in self.shape(name)]
        if ranges:
            ranges[dim] = slice(start, end).indices(ranges[dim][1])[:2]
        return self.read_region(name, *ranges)

    def read_row(self, name: str, *, row: int) -> torch.Tensor:
        """Read [row] of a stacked tensor."""
        return self.read(name, start=row, end=row + 1)[0]

    def __enter__(self) -> Self:
        return self


class HfReader(RegionReader):
    """Reads tensors of one folder on demand, and only the requested part. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises CheckpointError if the folder has no safetensors, a file is
        truncated, or index and files disagree."""
        self.folder = folder
        self._files: dict[str, SafetensorsFile] = {}
        try:
            names, index = weight_file_names(folder)
            for name in names:
                self._files[name] = SafetensorsFile(folder / name)
            self._where = file_by_tensor(folder, self._files, index)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        for file in self._files.values():
            file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    @property
    def files(self) -> dict[str, SafetensorsFile]:
        """Map the name of each file to the open file, in order."""
        return self._files

    def drop_cached_pages(self) -> None:
        """Drop everything that is read from now on from the page cache, since the folder is read
        only once."""
        for file in self._files.values():
            file.drops_cache = True

    def names(self) -> list[str]:
        """Return the names of all tensors of the folder."""
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._location(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor."""
        return self._location(name).torch_dtype

    def is_real(self, name: str) -> bool:
        """Return True if the tensor holds real numbers."""
        return self._location(name).is_real

    def read_region(self, name: str, *ranges: tuple[int, int]) -> torch.Tensor:
        self._location(name)
        return self._files[self._where[name]].read(name, ranges)

    def _location(self, name: str) -> TensorLocation:
        if name not in self._where:
            raise CheckpointError(
                f"`{self.folder}` lacks the weight `{name}`",
                why="config.json says that the model has this weight",
                fix=DOWNLOAD_AGAIN,
            )
        return self._files[self._where[name]].tensors[name]


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, max_shard_bytes: int = 4 * 2**30
) -> int:
    """Write `tensors` into `folder` in the given order, in files of at most `max_shard_bytes` (or
    one tensor), with an index if there is more than one file. Return the bytes of all tensors.
    Holds one shard in memory at a time."""
    shards = list(shard_files(folder, tensors, max_shard_bytes=max_shard_bytes))
    total = sum(shard.num_bytes for shard in shards)
    if len(shards) == 1:
        shards[0].file.rename(folder / SINGLE_NAME)
        return total
    weight_map = {}
    for number, shard in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        shard.file.rename(folder / final)
        weight_map.update(dict.fromkeys(shard.names, final))
    write_index(folder, weight_map, total=total)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """Describes one weight file that was written."""

    file: Path
    """Path, still under a temporary name."""
    names: list[str]
    """Names of its tensors."""
    num_bytes: int
    """Bytes of its tensors."""
    is_last: bool


def shard_files(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    max_shard_bytes: int,
    may_end: Callable[[Iterable[str]], bool] = lambda names: True,
) -> Iterator[ShardFile]:
    """Write `tensors` in the given order, in files of at most `max_shard_bytes`, and yield each
    file when it is complete. `may_end` returns whether a file with these names may end there; until
    it does, a file may grow larger. Holds one shard in memory at a time."""
    number = size = 0
    pending: dict[str, torch.Tensor] = {}

    def written(*, is_last: bool) -> ShardFile:
        file = folder / f"shard-{number:05d}.part"
        save_file(pending, file, metadata={"format": "pt"})
        done = ShardFile(file=file, names=list(pending), num_bytes=size, is_last=is_last)
        pending.clear()
        return done

    for name, tensor in tensors:
        more = tensor.numel() * tensor.element_size()
        if pending and size + more > max_shard_bytes and may_end(pending):
            yield written(is_last=False)
            number, size = number + 1, 0
        pending[name] = tensor.detach().cpu().contiguous()
        size += more
    yield written(is_last=True)


def write_index(folder: Path, weight_map: Mapping[str, str], *, total: int) -> None:
    """Write the index of weights in several files. `total`: bytes of all tensors."""
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
