"""Handles of device memory, as far as they can be looked at without a device; and when an engine
says that it has read."""

from __future__ import annotations

import base64
import errno
import inspect
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import reductions

from milescli.backends.sglang.inside import corrections
from milescli.backends.sglang.weights import shared_tensor
from milescli.core.errors import MachineError
from milescli.weights.base import layout, write_flat

BUCKET = [("w", (torch.arange(5000) % 251).to(torch.uint8))]


def test_a_handle_names_its_device_by_what_is_the_same_under_every_visibility(monkeypatch):
    """torch numbers the device as the sender sees it; SGLang looks for a UUID in the same place."""
    arguments = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    place = arguments.index("storage_device")
    of_torch = tuple(
        3 if index == place else f"argument {index}" for index in range(len(arguments))
    )
    monkeypatch.setattr(
        reductions, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, of_torch)
    )
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=f"uuid of {device}"),
    )
    rebuild, sent = shared_tensor._DeviceHandle(SimpleNamespace(is_cuda=True)).__reduce__()
    assert rebuild is reductions.rebuild_cuda_tensor
    assert sent == (*of_torch[:place], "uuid of 3", *of_torch[place + 1 :])


def _open(payload: str) -> torch.Tensor:
    return pickle.loads(base64.b64decode(payload))["flattened_tensor"]


def _files() -> list[Path]:
    return list(shared_tensor.FOLDER.glob(f"miles_{os.getpid()}_*"))


def test_any_number_of_readers_open_host_memory_until_it_is_freed():
    bucket = [
        ("bytes", torch.arange(40, dtype=torch.uint8)),
        ("half", torch.arange(12, dtype=torch.bfloat16).view(3, 4).T),
        ("one", torch.tensor(2.5)),
    ]
    slices = layout(bucket)
    expected = torch.empty(slices[-1].end, dtype=torch.uint8)
    write_flat(bucket, expected)
    buffer = shared_tensor.SharedBuffer(64 + 24 + 4, torch.device("cpu"))
    buffer.write(bucket)
    payload = buffer.payload(slices)
    first, second = _open(payload), _open(payload)
    assert torch.equal(first, expected) and torch.equal(second, first)
    buffer.write([("bytes", torch.full((len(expected),), 7, dtype=torch.uint8))])
    assert first.unique().tolist() == [7], "a copy was sent, not a handle"
    (file,) = _files()
    assert file.stat().st_mode & 0o777 == 0o600
    buffer.free()
    assert _files() == []
    assert first.unique().tolist() == [7], "a reader keeps what it has opened"
    with pytest.raises(RuntimeError, match="No such file"):
        _open(payload)
    assert _files() == [], "a reader that came too late made a file"


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_dev_shm_is_named_with_its_fix_and_nothing_stays_there(monkeypatch):
    monkeypatch.setattr(shared_tensor, "ROOM_WITHIN_S", 0.0)
    monkeypatch.setattr(os, "pwrite", _full)
    with pytest.raises(MachineError, match="/dev/shm is full") as caught:
        shared_tensor.SharedBuffer(3 * 2**20, torch.device("cpu")).write(BUCKET)
    assert "needs 3.0 MiB" in caught.value.why
    assert caught.value.fixes[0] == "--set weights.bucket_mib=16"
    assert _files() == []


def test_a_dev_shm_that_is_full_for_a_moment_is_waited_for_and_short_writes_go_on(monkeypatch):
    plain, sizes = os.pwrite, list[int]()

    def full_at_first(descriptor: int, data: memoryview, start: int) -> int:
        sizes.append(len(data))
        if len(sizes) == 2:
            _full()
        return plain(descriptor, data[:3000], start)

    monkeypatch.setattr(os, "pwrite", full_at_first)
    buffer = shared_tensor.SharedBuffer(5000, torch.device("cpu"))
    buffer.write(BUCKET)
    assert sizes == [5000, 2000, 5000, 2000]
    assert torch.equal(_open(buffer.payload(layout(BUCKET))), BUCKET[0][1])
    buffer.free()


def test_an_engine_answers_when_its_device_is_done(monkeypatch):
    happened: list[str] = []
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: happened.append("the device is done"))

    def load(self, names, load_format=None):
        happened.append(f"copies of {names} are queued")
        return True, "Success"

    assert corrections._then_wait(load)(SimpleNamespace(device="cpu"), "w") == (True, "Success")
    assert happened == ["copies of w are queued", "the device is done"]
