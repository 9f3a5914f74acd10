"""Streams of bytes: written past the page cache, checked, read back in parts."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.checkpoint.files import (
    StreamFile,
    as_bytes,
    crc32_combine,
    crc32_of,
    crc32_of_file,
    read_region,
)


@given(first=st.binary(max_size=300), second=st.binary(max_size=5000))
def test_checksums_of_parts_make_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(
        first + second
    )


@pytest.mark.parametrize(
    "sizes", [(0,), (1,), (4096,), (8 * 2**20,), (5, 9_000_001, 3), (8 * 2**20 - 1, 2)]
)
@pytest.mark.parametrize("direct", [True, False])
def test_a_stream_holds_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], direct: bool
) -> None:
    if not direct:
        plain = os.write

        def refuse(file: int, data: object) -> int:
            import fcntl

            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "not here")
            return plain(file, data)

        monkeypatch.setattr(os, "write", refuse)
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    with StreamFile(tmp_path / "f") as stream:
        stream.write(b"head")
        for part in parts:
            stream.write_tensor(part, crc32=crc32_of(part))
    expected = b"head" + b"".join(part.numpy().tobytes() for part in parts)
    assert (tmp_path / "f").read_bytes() == expected
    assert stream.size == len(expected) and stream.crc32 == zlib.crc32(expected) == crc32_of_file(
        tmp_path / "f"
    )


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_region_of_a_tensor_is_read(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    ranges = []
    for length in shape:
        start = data.draw(st.integers(0, length - 1))
        ranges.append((start, data.draw(st.integers(start, length))))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    path = tmp_path_factory.getbasetemp() / "region"
    path.write_bytes(b"xyz" + as_bytes(whole).numpy().tobytes())
    out = torch.empty([end - start for start, end in ranges], dtype=torch.int32)
    file = os.open(path, os.O_RDONLY)
    try:
        read_region(file, 3, shape, ranges, out, drop_cache=False)
    finally:
        os.close(file)
    assert torch.equal(out, whole[tuple(slice(*bounds) for bounds in ranges)])
