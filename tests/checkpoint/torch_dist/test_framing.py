"""Frames of tensors: torch and zip read ours, and ours reads torch's."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from milescli.checkpoint.files import as_bytes, crc32_of
from milescli.checkpoint.torch_dist.framing import (
    READ_AHEAD,
    Frame,
    NotFramed,
    framing_sizes,
    make_framing,
    parse_frame,
)

SHAPES = [(), (0, 3), (5,), (3, 4), (2, 3, 4)]


def _parse(content: bytes) -> Frame:
    near = min(READ_AHEAD, len(content))
    return parse_frame(
        content[:near],
        content[-near:],
        size=len(content),
        read=lambda at, length: content[at : at + length],
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("lead", [[()], [(), (1,)], [(1, 1), (1,), ()]], ids=str)
def test_one_tensor_is_found_in_every_shape_that_was_asked_for(
    shape: tuple[int, ...], dtype: torch.dtype, lead: list[tuple[int, ...]]
) -> None:
    tensor = torch.randn(shape).to(dtype)
    shapes = [(*ones, *shape) for ones in lead]
    data = as_bytes(tensor)
    framing = make_framing(dtype, shapes, crc32=crc32_of(data))
    content = framing.head + data.numpy().tobytes() + framing.tail
    assert framing_sizes(dtype, tuple(shapes)) == (len(framing.head), len(content), framing.spans)
    for wanted, (offset, length) in zip(shapes, framing.spans, strict=True):
        own = content[offset : offset + length]
        loaded = torch.load(io.BytesIO(own), weights_only=True)
        assert (
            loaded.shape == wanted
            and loaded.dtype is dtype
            and torch.equal(loaded.view(shape), tensor)
        )
        assert zipfile.ZipFile(io.BytesIO(own)).testzip() is None
        frame = _parse(own)
        assert (frame.shape, frame.dtype, frame.is_contiguous) == (wanted, dtype, True)
        assert own[frame.data_offset : frame.data_offset + data.numel()] == data.numpy().tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(300, 400).t(),
        torch.randn(10, 4)[3:7],
        torch.nn.Parameter(torch.randn(2, 2)),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.tensor(3.0),
    ],
    ids=["plain", "transposed", "view", "parameter", "fp8", "scalar"],
)
def test_what_torch_saved_is_found(tensor: torch.Tensor) -> None:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    content = stream.getvalue()
    frame = _parse(content)
    assert (
        frame.shape == tuple(tensor.shape)
        and frame.dtype is tensor.dtype
        and frame.strides == tensor.stride()
    )
    raw = torch.frombuffer(
        bytearray(content[frame.data_offset :][: tensor.untyped_storage().nbytes()]),
        dtype=torch.uint8,
    )
    count = 1 + sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    read = (
        raw[: count * tensor.itemsize].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    )
    assert torch.equal(read.float(), tensor.detach().float())


def test_a_tensor_beyond_four_gigabytes_is_framed_too(tmp_path: Path) -> None:
    count = 2**31 + 1000
    framing = make_framing(torch.bfloat16, [(1, count), (count,)], crc32=0)
    path = tmp_path / "wide"
    with path.open("wb") as file:  # a hole: it takes no room
        file.write(framing.head)
        file.seek(2 * count, os.SEEK_CUR)
        file.write(framing.tail)
    assert torch.load(path, mmap=True, weights_only=True).shape == (count,)
    offset, length = framing.spans[0]
    with path.open("rb") as file:

        def read(at: int, size: int) -> bytes:
            return os.pread(file.fileno(), size, offset + at)

        frame = parse_frame(
            read(0, READ_AHEAD), read(length - READ_AHEAD, READ_AHEAD), size=length, read=read
        )
    assert frame.shape == (1, count)


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("this must never be printed",)


def test_anything_else_is_refused_unread(capsys: pytest.CaptureFixture[str]) -> None:
    evil, two = io.BytesIO(), io.BytesIO()
    torch.save(_Evil(), evil)
    torch.save([torch.ones(1), torch.ones(1)], two)
    whole = io.BytesIO()
    torch.save(torch.ones(3000), whole)
    contents = [
        evil.getvalue(),
        two.getvalue(),
        b"",
        b"PK\5\6",
        whole.getvalue()[:-200],
        pickle.dumps(torch.ones(2).tolist()),
    ]
    for content in contents:
        with pytest.raises(NotFramed):
            _parse(content)
    assert "printed" not in capsys.readouterr().out
