"""Writes and reads large files as streams, bypassing the page cache if the file system allows it,
with checksums. Knows nothing of tensor formats. Called by the writers of this package."""

from __future__ import annotations

import errno
import math
import mmap
import os
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import torch

BLOCK = 4096
"""Addresses, offsets and lengths of direct input and output must be multiples of this."""
_STAGE = 8 * 2**20
_COLUMNS_STEP = 32 * 2**20


class StreamFile:
    """Writes a file once, from the first byte to the last. Bypasses the page cache if possible: a
    terabyte that streams through it would evict everything else, and take longer. A context
    manager; `close` makes the file durable."""

    def __init__(self, path: Path) -> None:
        """Create the file, replacing an existing one."""
        path.unlink(missing_ok=True)
        self.path = path
        self.size = 0
        """Bytes written."""
        self.crc32 = 0
        """Of all bytes written."""
        self._memory = mmap.mmap(-1, _STAGE)
        self._stage = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._used = 0
        self._direct = True
        try:
            self._file = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0), 0o644
            )
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def __enter__(self) -> StreamFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def write(self, data: bytes) -> None:
        """Append a few bytes."""
        if data:
            self.write_tensor(
                torch.frombuffer(bytearray(data), dtype=torch.uint8), crc32=zlib.crc32(data)
            )

    def write_tensor(self, data: torch.Tensor, *, crc32: int) -> None:
        """Append `data` [bytes] uint8, contiguous, whose checksum is `crc32`."""
        self.crc32 = crc32_combine(self.crc32, crc32, data.numel())
        self.size += data.numel()
        start = 0
        while start < data.numel():
            length = min(_STAGE - self._used, data.numel() - start)
            self._stage[self._used : self._used + length].copy_(data[start : start + length])
            self._used += length
            start += length
            if self._used == _STAGE:
                self._flush(_STAGE)

    def _flush(self, length: int) -> None:
        view = memoryview(self._memory)[:length]
        done = 0
        while done < length:
            try:
                done += os.write(self._file, view[done:])
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._disable_direct()
        self._used = 0

    def _disable_direct(self) -> None:
        """Turn direct output off: some network and overlay file systems accept it when a file is
        opened, but refuse the write."""
        import fcntl

        self._direct = False
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))

    def close(self) -> None:
        """Write the rest of the buffer and make the file durable. The last block is padded for the
        disk; the file is then truncated to its real length."""
        if self._file < 0:
            return
        try:
            if self._used:
                padded = -(-self._used // BLOCK) * BLOCK if self._direct else self._used
                self._stage[self._used : padded] = 0
                self._flush(padded)
            os.ftruncate(self._file, self.size)
            os.fsync(self._file)
        finally:
            self._release()

    def _release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            del self._stage, self._memory


def read_exactly(file: int, out: torch.Tensor, *, offset: int, drop_cache: bool) -> None:
    """Fill `out` [bytes] uint8, contiguous, from `offset` of an open file. `drop_cache`: drop the
    pages that were read from the cache. Raises EOFError if the file is too short."""
    view = memoryview(out.numpy())
    done = 0
    while done < len(view):
        # one call never reads 2 GiB or more
        count = os.preadv(file, [view[done : done + 2**30]], offset + done)
        if count == 0:
            raise EOFError(f"the file ends {len(view) - done} bytes early")
        done += count
    if drop_cache and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, offset, len(view), os.POSIX_FADV_DONTNEED)


def read_region(
    file: int,
    begin: int,
    shape: Sequence[int],
    ranges: Sequence[tuple[int, int]],
    out: torch.Tensor,
    *,
    drop_cache: bool,
) -> None:
    """Fill `out`, contiguous, with the region [start:end along every dim] of a tensor of `shape`
    and of `out`'s dtype, whose elements lie in order from byte `begin`. Reads bytes outside the
    region only if that is faster. Raises EOFError, OSError."""
    if not out.numel():
        return
    # leading dims of one index, then one dim that is cut, then dims that are whole
    cut = len(shape)
    while cut and tuple(ranges[cut - 1]) == (0, shape[cut - 1]):
        cut -= 1
    cut = max(cut - 1, 0)
    element = out.element_size()
    if all(end - start == 1 for start, end in ranges[:cut]):
        offset = 0
        for (start, _), length in zip(ranges[: cut + 1], shape[: cut + 1], strict=True):
            offset = offset * length + start
        offset *= math.prod(shape[cut + 1 :]) * element
        read_exactly(file, as_bytes(out), offset=begin + offset, drop_cache=drop_cache)
        return
    # columns of rows: whole rows are read, a few at a time
    row_bytes = math.prod(shape[1:]) * element
    step = max(1, _COLUMNS_STEP // row_bytes)
    start, end = ranges[0]
    inside = tuple(slice(*bounds) for bounds in ranges[1:])
    for row in range(start, end, step):
        last = min(row + step, end)
        rows = torch.empty((last - row, *shape[1:]), dtype=out.dtype)
        read_exactly(file, as_bytes(rows), offset=begin + row * row_bytes, drop_cache=drop_cache)
        out[row - start : last - start].copy_(rows[(slice(None), *inside)])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor as [bytes] uint8, sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def crc32_of(data: torch.Tensor, start: int = 0) -> int:
    """Compute the CRC-32 of contiguous [bytes] uint8; `start`: CRC-32 of the preceding bytes."""
    return zlib.crc32(memoryview(data.numpy()), start)


def crc32_of_file(
    path: Path, *, start: int = 0, length: int | None = None, step: int = 8 * 2**20
) -> int:
    """Compute the CRC-32 of a part of a file as it is on disk: cached pages are dropped first."""
    crc32, buffer = 0, torch.empty(step, dtype=torch.uint8)
    file = os.open(path, os.O_RDONLY)
    try:
        end = os.fstat(file).st_size if length is None else start + length
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, start, end - start, os.POSIX_FADV_DONTNEED)
        for offset in range(start, end, step):
            part = buffer[: min(step, end - offset)]
            read_exactly(file, part, offset=offset, drop_cache=True)
            crc32 = crc32_of(part, crc32)
    finally:
        os.close(file)
    return crc32


def _apply(matrix: list[int], vector: int) -> int:
    product = 0
    for row in matrix:
        if not vector:
            break
        if vector & 1:
            product ^= row
        vector >>= 1
    return product


def _square(matrix: list[int]) -> list[int]:
    return [_apply(matrix, row) for row in matrix]


@lru_cache(maxsize=1)
def _zero_byte_operators() -> list[list[int]]:
    """Return operators that append 1, 2, 4, ... zero bytes to a CRC-32 (Mark Adler's method, as in
    zlib's crc32_combine)."""
    bit = [0xEDB88320, *(1 << place for place in range(31))]
    operators = [_square(_square(_square(bit)))]
    for _ in range(47):
        operators.append(_square(operators[-1]))
    return operators


def crc32_combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two concatenated strings, given that of each and the `length` of the
    second."""
    for power in _zero_byte_operators():
        if not length:
            break
        if length & 1:
            first = _apply(power, first)
        length >>= 1
    return first ^ second
