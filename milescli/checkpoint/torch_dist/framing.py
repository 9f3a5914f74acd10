"""Frames one tensor in a `torch_dist` file as torch.save does: a zip archive of stored records.
Writing the frame here reuses known checksums; reading it here reads a part of a tensor without the
rest, and executes no pickle. Called by writer and reader."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

_ALIGN = 64
"""Data begin at a multiple of this, as in torch.save."""
_DATA = "archive/data/0"
_NUM_RECORDS = 6
"""Records of one tensor: five small ones and the data."""
_MAX32 = 0xFFFFFFFF
READ_AHEAD = 4096
"""Bytes at each end of a frame that `parse_frame` needs; torch.save writes fewer there for one
tensor."""


class NotFramed(ValueError):
    """Reports that the bytes are not one tensor as torch.save writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Locates a tensor within its frame."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    data_offset: int
    """First byte of the tensor, from the start of the frame."""

    @property
    def is_contiguous(self) -> bool:
        """Return True if the elements lie in order."""
        return self.strides == contiguous_strides(self.shape) or math.prod(self.shape) == 0


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides in elements."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides)) if shape else ()


class _Storage:
    """Stands for a tensor's storage in the pickle that is written."""

    def __init__(self, dtype: torch.dtype, num_elements: int) -> None:
        self.dtype, self.num_elements = dtype, num_elements


class _Tensor:
    """Pickles like a contiguous torch tensor with its own storage."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self.dtype, self.shape = dtype, tuple(shape)

    def __reduce__(self) -> tuple[object, ...]:
        storage = _Storage(self.dtype, math.prod(self.shape))
        return torch._utils._rebuild_tensor_v2, (
            storage,
            0,
            self.shape,
            contiguous_strides(self.shape),
            False,
            OrderedDict(),
        )


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        if not isinstance(value, _Storage):
            return None
        kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[value.dtype])
        return ("storage", kind, "0", "cpu", value.num_elements)


@lru_cache(maxsize=1024)
def _small_records(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[tuple[str, bytes], ...]:
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(_Tensor(dtype, shape))
    return (
        ("archive/data.pkl", stream.getvalue()),
        ("archive/.format_version", b"1"),
        ("archive/.storage_alignment", str(_ALIGN).encode()),
        ("archive/byteorder", b"little"),
        ("archive/version", b"3\n"),
    )


def _local(name: str, *, crc32: int, size: int, offset: int) -> bytes:
    """Return the local header of a record at `offset`, padded so that its data are aligned."""
    wide = size >= _MAX32
    extra = struct.pack("<HHQQ", 1, 16, size, size) if wide else b""
    filling = -(offset + 30 + len(name) + len(extra) + 4) % _ALIGN
    extra += struct.pack("<2sH", b"FB", filling) + b"Z" * filling
    listed = _MAX32 if wide else size
    fixed = struct.pack(
        "<4sHHHHHIIIHH", b"PK\3\4", 45, 0x800, 0, 0, 0, crc32, listed, listed, len(name), len(extra)
    )
    return fixed + name.encode() + extra


def _central(name: str, *, crc32: int, size: int, offset: int) -> bytes:
    wide = size >= _MAX32
    extra = struct.pack("<HHQQ", 1, 16, size, size) if wide else b""
    listed = _MAX32 if wide else size
    fixed = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        b"PK\1\2",
        45,
        45,
        0x800,
        0,
        0,
        0,
        crc32,
        listed,
        listed,
        len(name),
        len(extra),
        0,
        0,
        0,
        0,
        offset,
    )
    return fixed + name.encode() + extra


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """Holds the bytes around the data of one tensor, which make it readable in several shapes:
    nested archives that share the data."""

    head: bytes
    tail: bytes
    spans: tuple[tuple[int, int], ...]
    """Per shape (offset from the start of `head`, bytes) of the archive in that shape."""


def make_framing(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]], *, crc32: int) -> Framing:
    """Make the framing of a contiguous tensor whose data have the checksum `crc32`. `shapes` have
    equally many elements, the first innermost. The data are the last record of each archive, so
    that no offset within one exceeds 32 bits."""
    size = math.prod(shapes[0]) * dtype.itemsize
    heads = [_head(dtype, shape) for shape in shapes]
    shared = _local(_DATA, crc32=crc32, size=size, offset=sum(len(head) for head, _ in heads))
    begin = sum(len(head) for head, _ in heads)
    head, tail, spans = b"", b"", []
    for own, directory in heads:
        # from the innermost outwards: each stands before those within it
        head = own + head
        at = len(head)
        entry = _central(_DATA, crc32=crc32, size=size, offset=at)
        tail += _end(
            directory + entry, count=_NUM_RECORDS, start=at + len(shared) + size + len(tail)
        )
        spans.append((begin - at, at + len(shared) + size + len(tail)))
    return Framing(head=head + shared, tail=tail, spans=tuple(spans))


@lru_cache(maxsize=1024)
def _head(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return (the small records, whose length is a multiple of the alignment; their entries in the
    directory)."""
    head, directory = b"", b""
    for name, content in _small_records(dtype, shape):
        crc32 = zlib.crc32(content)
        directory += _central(name, crc32=crc32, size=len(content), offset=len(head))
        head += _local(name, crc32=crc32, size=len(content), offset=len(head)) + content
    return head + b"Z" * (-len(head) % _ALIGN), directory


def _end(directory: bytes, *, count: int, start: int) -> bytes:
    """Return the directory, which begins at `start`, and the end records of the archive: the one
    with wide offsets, its locator, and the plain one."""
    end64 = struct.pack(
        "<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start
    )
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1)
    return (
        directory
        + end64
        + locator
        + struct.pack(
            "<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, len(directory), min(start, _MAX32), 0
        )
    )


@lru_cache(maxsize=4096)
def framing_sizes(
    dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]
) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Return (bytes before the data, total bytes, spans as in Framing)."""
    made = make_framing(dtype, shapes, crc32=0)
    return (
        len(made.head),
        len(made.head) + math.prod(shapes[0]) * dtype.itemsize + len(made.tail),
        made.spans,
    )


def parse_frame(head: bytes, tail: bytes, *, size: int, read: Callable[[int, int], bytes]) -> Frame:
    """Locate the tensor in a frame. `head`, `tail`: its first and last READ_AHEAD bytes; `size`: of
    the frame; `read`: maps (offset within the frame, length) to bytes, if more are needed. Raises
    NotFramed for anything but one tensor as torch.save writes it."""
    try:
        return _parse(head, tail, size=size, read=read)
    except Exception as error:  # unpacking damaged bytes raises whatever these ask for
        raise NotFramed(f"{type(error).__name__}: {error}") from error


def _parse(head: bytes, tail: bytes, *, size: int, read: Callable[[int, int], bytes]) -> Frame:
    def bytes_at(offset: int, length: int) -> bytes:
        if offset + length <= len(head):
            return head[offset : offset + length]
        if offset >= size - len(tail):
            return tail[offset - size + len(tail) :][:length]
        return read(offset, length)

    end = tail.rindex(b"PK\5\6")
    count, directory_size, start = struct.unpack("<HII", tail[end + 10 : end + 20])
    if tail[end - 20 : end - 16] == b"PK\6\7":
        at = struct.unpack("<Q", tail[end - 12 : end - 4])[0]
        count, directory_size, start = struct.unpack("<QQQ", bytes_at(at, 56)[32:56])
    records = _directory(bytes_at(start, directory_size), count)
    name = next(name for name in records if name.endswith("/data.pkl"))
    offset, length = records[name]
    content = bytes_at(_data_of(bytes_at, offset), length)
    tensor = _Unpickler(io.BytesIO(content)).load()
    if not isinstance(tensor, _PickledTensor):
        raise ValueError(f"it contains a {type(tensor).__name__}")
    data_record, available = records[name.removesuffix(".pkl") + "/" + tensor.key]
    if available < tensor.num_bytes_needed:
        raise ValueError(f"{available} bytes of data, and {tensor.num_bytes_needed} are needed")
    begin = _data_of(bytes_at, data_record) + tensor.first * tensor.dtype.itemsize
    return Frame(dtype=tensor.dtype, shape=tensor.shape, strides=tensor.strides, data_offset=begin)


def _directory(content: bytes, count: int) -> dict[str, tuple[int, int]]:
    """Return name -> (offset of its local header, size)."""
    records, at = {}, 0
    for _ in range(count):
        if content[at : at + 4] != b"PK\1\2":
            raise ValueError("its directory is incomplete")
        method, _, _, _, _, size, name_length, extra_length, comment = struct.unpack(
            "<HHHIIIHHH", content[at + 10 : at + 34]
        )
        if method:
            raise ValueError("it is compressed")
        offset = struct.unpack("<I", content[at + 42 : at + 46])[0]
        name = content[at + 46 : at + 46 + name_length].decode()
        extra = content[at + 46 + name_length : at + 46 + name_length + extra_length]
        if size == _MAX32 or offset == _MAX32:
            size, offset = _wide(extra, size=size, offset=offset)
        records[name] = (offset, size)
        at += 46 + name_length + extra_length + comment
    return records


def _wide(extra: bytes, *, size: int, offset: int) -> tuple[int, int]:
    """Return size and offset, from the extra field if they exceed 32 bits. It holds uncompressed
    size, compressed size and offset, each only if its 32-bit field is full."""
    at = 0
    while at < len(extra):
        kind, length = struct.unpack("<HH", extra[at : at + 4])
        if kind == 1:
            values = list(
                struct.unpack(f"<{length // 8}Q", extra[at + 4 : at + 4 + length // 8 * 8])
            )
            if size == _MAX32:
                size = values.pop(0)
                values.pop(0)
            return size, values.pop(0) if offset == _MAX32 else offset
        at += 4 + length
    raise ValueError("its directory lacks the 64-bit sizes")


def _data_of(bytes_at: Callable[[int, int], bytes], offset: int) -> int:
    fixed = bytes_at(offset, 30)
    if fixed[:4] != b"PK\3\4":
        raise ValueError(f"there is no record at byte {offset}")
    name_length, extra_length = struct.unpack("<HH", fixed[26:30])
    return offset + 30 + name_length + extra_length


@dataclass(frozen=True, slots=True)
class _PickledTensor:
    """Describes a tensor as its pickle does."""

    dtype: torch.dtype
    key: str
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_bytes_needed(self) -> int:
        if math.prod(self.shape) == 0:
            return 0
        last = self.first + sum(
            (length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True)
        )
        return (last + 1) * self.dtype.itemsize


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Resolves the few names that a pickled tensor uses, and executes none of them. Pure Python: a
    single damaged byte makes the unpickler in C allocate tens of GB for its memo."""

    def find_class(self, module: str, name: str) -> object:
        if module == "torch._utils" and name in (
            "_rebuild_tensor_v2",
            "_rebuild_tensor_v3",
            "_rebuild_parameter",
        ):
            return {
                "_rebuild_tensor_v2": _typed,
                "_rebuild_tensor_v3": _untyped,
                "_rebuild_parameter": _parameter,
            }[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and name == "UntypedStorage":
            return torch.uint8
        if module == "torch" and name.endswith("Storage"):
            kinds = {
                kind: dtype for dtype, kind in torch.storage._dtype_to_storage_type_map().items()
            }
            return kinds[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it would load {module}.{name}")

    def persistent_load(self, value: object) -> object:
        kind, dtype, key, *_ = value  # type: ignore[misc]
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"it refers to {kind}")
        return dtype, str(key)


def _typed(
    storage: tuple[torch.dtype, str],
    first: int,
    shape: Sequence[int],
    strides: Sequence[int],
    *rest: object,
) -> _PickledTensor:
    return _PickledTensor(storage[0], storage[1], first, tuple(shape), tuple(strides))


def _untyped(
    storage: tuple[torch.dtype, str],
    first: int,
    shape: Sequence[int],
    strides: Sequence[int],
    grad: bool,
    hooks: object,
    dtype: torch.dtype,
) -> _PickledTensor:
    return _PickledTensor(dtype, storage[1], first, tuple(shape), tuple(strides))


def _parameter(tensor: _PickledTensor, *rest: object) -> _PickledTensor:
    return tensor
