"""Channels to engines that share no memory with the trainer, as one rank has them: their files, and
what they refuse. test_shards.py sends real engines weights through them."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from milescli.backends.sglang.inside import remote
from milescli.backends.sglang.weights.read_channels import DiskChannel, RdmaChannel
from milescli.core.errors import MachineError
from milescli.core.types import EngineAddress
from milescli.weights.remote import ReceiveBuffer, RemoteMemory
from tests.backends.sglang.launch.slow_engine import SlowEngine

NUM_BUCKETS = 5


def buckets():
    for index in range(NUM_BUCKETS):
        yield [("w", torch.full((4000,), index, dtype=torch.uint8).view(torch.float32))]


def disk(folder: Path, engine: SlowEngine) -> DiskChannel:
    channel = DiskChannel(timeout_s=60)
    channel.place = str(folder)
    channel.open([EngineAddress(url=engine.url, tp=2, sharing_ranks=[])])
    return channel


def test_engine_ranks_read_each_bucket_from_a_file_of_its_own(tmp_path: Path) -> None:
    folder, seen = tmp_path / "weights", list[list[str]]()

    def look(_: int) -> None:
        seen.append(sorted(path.name for path in folder.iterdir()))

    engine = SlowEngine(look)
    folder.mkdir()
    (folder / "rank0-left-by-a-kill").touch()
    (folder / "rank1-of-another").touch()
    channel = disk(folder, engine)
    channel.send(buckets())
    channel.close()
    engine.close()
    assert [[sorted(set(flat.tolist())) for flat in bucket] for bucket in engine.read] == [
        [[index], [index]] for index in range(NUM_BUCKETS)
    ]
    own = [{name for name in names if name != "rank1-of-another"} for names in seen]
    assert len(set.union(*own)) == NUM_BUCKETS, "an old file may be in a node's cache"
    assert all(len(names) <= 2 for names in own)
    assert [path.name for path in folder.iterdir()] == ["rank1-of-another"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    engine = SlowEngine(lambda _: None)
    channel = disk(folder, engine)
    folder.rmdir()
    with pytest.raises(MachineError, match=str(folder)) as caught:
        channel.send(buckets())
    channel.close()
    engine.close()
    assert "No such file or directory: a file needs" in caught.value.why
    assert caught.value.fixes == [f"ls -ld {folder}"]


def test_a_full_disk_is_named_and_nothing_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "weights"
    engine = SlowEngine(lambda _: None)
    channel = disk(folder, engine)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(MachineError, match="cannot be written") as caught:
        channel.send(buckets())
    channel.close()
    engine.close()
    assert caught.value.fixes[0] == "--set weights.bucket_mib=16"
    assert list(folder.iterdir()) == []


class Mooncake:
    """Stands for its transfer engine, within one process."""

    def __init__(self) -> None:
        self.registered = dict[int, int]()

    def get_rpc_port(self) -> int:
        return 9

    def register_memory(self, address: int, size: int) -> int:
        self.registered[address] = size
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 1

    def batch_transfer_sync_read(
        self, _: str, into: list[int], addresses: list[int], sizes: list[int]
    ) -> int:
        for target, source, size in zip(into, addresses, sizes, strict=True):
            if not any(at <= source < at + length for at, length in self.registered.items()):
                return 1
            ctypes.memmove(target, source, size)
        return 0


def test_an_endpoint_reads_what_another_offers_and_nothing_that_it_forgot() -> None:
    end = remote.Endpoint(Mooncake(), "127.0.0.1")
    numbers = torch.arange(100, dtype=torch.float32)
    offered = numbers.clone().view(torch.uint8)
    end.register(offered)
    buffer = ReceiveBuffer(end)
    buffer.begin(offered.nbytes)
    handle = remote.handle_of(end, offered)
    assert remote.is_remote(handle)
    box = RemoteMemory(handle.removeprefix("rdma:"), buffer).box(
        0, dtype=torch.float32, shape=(10, 10)
    )
    assert torch.equal(box[2:5, 3:4], numbers.view(10, 10)[2:5, 3:4])
    end.forget(offered)
    with pytest.raises(OSError, match=r"cannot read the memory of 127\.0\.0\.1:9"):
        box[2:5, 3:4]


def test_a_node_without_rdma_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MC_FORCE_TCP")
    monkeypatch.setattr(remote, "DEVICES", tmp_path / "infiniband")
    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=Mooncake))
    channel = RdmaChannel(timeout_s=60)
    with pytest.raises(MachineError, match="cannot be sent over RDMA") as caught:
        channel.open([EngineAddress(url="http://127.0.0.1:9", tp=1, sharing_ranks=[])])
    channel.close()
    assert "has no RDMA device" in caught.value.why
