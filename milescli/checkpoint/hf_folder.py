"""Weights of a Hugging Face folder: reading parts of tensors from safetensors, and writing them in shards with an index. No vendor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from milescli.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_FETCH_AGAIN = "fetch the model again, as safetensors"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""As safetensors writes them -> as torch calls them."""


class HfReader:
    """Open files of one folder; tensors are read when they are asked for, and only the part that is asked for. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where the folder has no safetensors, or one that its index names is missing."""
        self.folder = folder
        self._open = ExitStack()
        self._files = {name: self._safe_open(name) for name in _file_names(folder)}
        self._where = {key: name for name, file in self._files.items() for key in file.keys()}  # noqa: SIM118

    def __enter__(self) -> HfReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def _safe_open(self, name: str) -> safe_open:
        try:
            return self._open.enter_context(safe_open(self.folder / name, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read `{self.folder / name}`", why=str(error), fix=_FETCH_AGAIN) from error

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> list[str]:
        """All tensors of the folder."""
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor. Raises CheckpointError where there is none of that name."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, *, dim: int = 0, start: int = 0, end: int | None = None) -> torch.Tensor:
        """[..., start:end along `dim` (0 or 1), ...] of a tensor."""
        part = self._slice(name)
        if start == 0 and end is None:
            return part[:]
        return part[start:end] if dim == 0 else part[:, start:end]

    def read_row(self, name: str, *, row: int) -> torch.Tensor:
        """[row] of a stacked tensor."""
        return self._slice(name)[row]

    def read_region(self, name: str, *ranges: tuple[int, int]) -> torch.Tensor:
        """[start:end along every dim] of a tensor; a scalar has no range."""
        part = self._slice(name)
        return part[tuple(slice(*each) for each in ranges)] if ranges else self._files[self._where[name]].get_tensor(name)

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor as it is stored."""
        import torch

        return getattr(torch, _DTYPES[self._slice(name).get_dtype()])

    def _slice(self, name: str):
        if name not in self._where:
            raise CheckpointError(
                f"`{self.folder}` lacks the weight `{name}`",
                why="config.json says that the model has it",
                fix=_FETCH_AGAIN,
            )
        return self._files[self._where[name]].get_slice(name)


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX_NAME
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"cannot read `{index}`", why=f"{type(error).__name__}: {error}", fix=_FETCH_AGAIN) from error
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointError(f"cannot read `{index}`", why=f"`{outside[0]}` lies outside the folder", fix=_FETCH_AGAIN)
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in names if not (folder / name).exists()]
    if missing or not names:
        why = f"`{missing[0]}` is named by the index but not there" if missing else "it holds no *.safetensors file"
        raise CheckpointError(f"`{folder}` has no usable weights", why=why, fix=_FETCH_AGAIN)
    return names


def write_tensors(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, max_shard_bytes: int = 4 * 2**30) -> int:
    """Write `tensors` into `folder` in the order given, in files of at most `max_shard_bytes` (or one tensor), with an index
    where there is more than one file. Returns the bytes of all tensors. Holds one shard in memory at a time."""
    shards: list[list[str]] = []
    total = held = 0
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        save_file(pending, folder / _temporary(len(shards)), metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and held + size > max_shard_bytes:
            flush()
            held = 0
        pending[name] = tensor.detach().cpu().contiguous()
        held, total = held + size, total + size
    flush()
    _name_shards(folder, shards, total=total)
    return total


def _temporary(number: int) -> str:
    return f"shard-{number:05d}.part"


def _name_shards(folder: Path, shards: list[list[str]], *, total: int) -> None:
    if len(shards) == 1:
        (folder / _temporary(0)).rename(folder / SINGLE_NAME)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / _temporary(number)).rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
