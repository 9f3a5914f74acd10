"""The safetensors format: reads headers with every check, makes headers, reads parts of tensors
without mapping the file. Called by `hf_folder` and by the writers of this package.

Replaces safetensors' own `safe_open`: pages that it maps count as memory of the process, and with
`backend="pread"` it reads the whole tensor for each slice of it (one expert of 64 takes as long as
all)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.core.errors import CheckpointError
from milescli.core.files import open_regular, parse_json

if TYPE_CHECKING:
    import torch

DOWNLOAD_AGAIN = "fetch the model again, as safetensors"
_LONGEST_HEADER = 100 * 2**20
_DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 64),
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F4": ("float4_e2m1fn_x2", 4),
    "I64": ("int64", 64),
    "I32": ("int32", 32),
    "I16": ("int16", 16),
    "I8": ("int8", 8),
    "U64": ("uint64", 64),
    "U32": ("uint32", 32),
    "U16": ("uint16", 16),
    "U8": ("uint8", 8),
    "BOOL": ("bool", 8),
}
"""Name in safetensors -> (name in torch, bits)."""
_NAMES = {torch_name: name for name, (torch_name, _) in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLocation:
    """Locates one tensor within a file."""

    dtype: str
    """Dtype as safetensors writes it."""
    shape: tuple[int, ...]
    begin: int
    """First byte, from the start of the file."""
    num_bytes: int

    @property
    def is_real(self) -> bool:
        """Return True for a dtype of real numbers; False for integers and booleans."""
        return self.dtype.startswith(("F", "BF"))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the torch dtype."""
        return torch_dtype(self.dtype)


class SafetensorsFile:
    """Reads one open file, which must be closed."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises CheckpointError if it cannot be opened, is truncated, or has no
        valid header."""
        self.path = path
        self.drops_cache = False
        """What was read is forgotten by the page cache: it streams by once."""
        try:
            with open_regular(path) as file:
                self._file = os.dup(file.fileno())
        except OSError as error:
            raise _unreadable(path, str(error)) from error
        try:
            self.tensors, self.metadata = _read_header(self._file, path)
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Read [start:end along every dim]. Raises CheckpointError if bytes are missing."""
        import torch

        from milescli.checkpoint.files import read_region

        stored = self.tensors[name]
        shape = list(stored.shape)
        if stored.dtype == "F4":
            # torch counts pairs
            shape[-1] //= 2
            ranges = [*ranges[:-1], (ranges[-1][0] // 2, ranges[-1][1] // 2)]
        out = torch.empty([end - start for start, end in ranges], dtype=stored.torch_dtype)
        try:
            read_region(self._file, stored.begin, shape, ranges, out, drop_cache=self.drops_cache)
        except (OSError, EOFError) as error:
            raise _unreadable(self.path, f"`{name}`: {error}") from error
        return out


_EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "BF16": ("<u2", 0xFF << 7),
    "F16": ("<u2", 0x1F << 10),
}
"""Floating-point dtypes -> (numpy's unsigned integer of that size, bits of the exponent)."""


def num_non_finite(path: Path, stored: TensorLocation) -> int:
    """Return how many numbers of a tensor are NaN or infinite: all bits of their exponents are set.
    Loads no torch."""
    if stored.dtype not in _EXPONENTS or not stored.num_bytes:
        return 0
    import numpy as np

    kind, exponent = _EXPONENTS[stored.dtype]
    count = stored.num_bytes // np.dtype(kind).itemsize
    words = np.fromfile(path, dtype=kind, count=count, offset=stored.begin)
    mask = words.dtype.type(exponent)
    return int(np.count_nonzero((words & mask) == mask))


def _read_header(file: int, path: Path) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    size = os.fstat(file).st_size
    start = os.pread(file, 8, 0)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > _LONGEST_HEADER:
        raise _unreadable(path, f"it does not begin as a safetensors file does ({size} bytes)")
    if 8 + length > size:
        raise _unreadable(
            path, f"it is truncated: its header has {length} bytes, and the file {size}"
        )
    try:
        header = parse_json(os.pread(file, length, 8), object_pairs_hook=_without_duplicates)
        metadata = header.pop("__metadata__", None) or {}
        tensors = {
            name: _parse_location(entry, data_start=8 + length) for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(
            path, f"its header cannot be understood: {type(error).__name__}: {error}"
        ) from error
    end = 8 + length
    for name, stored in sorted(
        tensors.items(), key=lambda item: (item[1].begin, item[1].num_bytes)
    ):
        if stored.begin != end:
            raise _unreadable(
                path,
                f"`{name}` begins at byte {stored.begin}, and the tensor before it ends at {end}",
            )
        end += stored.num_bytes
    if end > size:
        raise _unreadable(path, f"it is truncated: {size} bytes of {end}")
    if end < size:
        raise _unreadable(path, f"{size - end} bytes at its end belong to no tensor")
    return tensors, {str(key): str(value) for key, value in metadata.items()}


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    header = dict(pairs)
    if len(header) != len(pairs):
        raise ValueError("a name appears twice")
    return header


def _parse_location(entry: Mapping[str, object], *, data_start: int) -> TensorLocation:
    dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[arg-type,misc]
    if dtype not in _DTYPES:
        raise ValueError(f"there is no dtype {dtype}")
    if any(not isinstance(length, int) or length < 0 for length in (*shape, begin, end)):
        raise ValueError(f"shape {list(shape)}, bytes {begin} to {end}")
    if math.prod(shape) * _DTYPES[dtype][1] != 8 * (end - begin):
        raise ValueError(f"{dtype} of shape {list(shape)} does not have {end - begin} bytes")
    return TensorLocation(dtype=dtype, shape=shape, begin=data_start + begin, num_bytes=end - begin)


def _unreadable(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"cannot read `{path}`", why=why, fix=DOWNLOAD_AGAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Describes a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its data."""
        return math.prod(self.shape) * _DTYPES[dtype_name(self.dtype)][1] // 8


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors."""
    return _NAMES[str(dtype).removeprefix("torch.")]


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name in safetensors. Raises KeyError."""
    import torch

    return getattr(torch, _DTYPES[name][0])


def make_header(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return everything before the data, which follow in the given order. With the order of
    safetensors' own writer, the result equals its header byte for byte."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for spec in tensors:
        end = begin + spec.num_bytes
        entries[spec.name] = {
            "dtype": dtype_name(spec.dtype),
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
