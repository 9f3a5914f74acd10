"""The channel through an object store as one rank has it: where its objects are, for how long, and
what it says of a store that fails. test_shards.py sends real engines weights through it."""

from __future__ import annotations

import base64
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from milescli.backends.sglang.inside.links import read_links
from milescli.backends.sglang.weights.store_channel import StoreChannel
from milescli.backends.stores.store import ObjectStore, StoreError, StoreUrl
from milescli.core.types import EngineAddress
from tests.backends.sglang.launch.slow_engine import SlowEngine

NUM_BUCKETS = 5


def buckets():
    for index in range(NUM_BUCKETS):
        yield [("w", torch.full((1000,), float(index))), ("b", torch.full((3,), -1.0))]


class ReadingEngine(SlowEngine):
    """Reads what its orders link to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(lambda _: None)
        self.folder = folder
        self.seen: list[list[str]] = []
        """[buckets] names of the objects that were there."""
        self.loaded: list[dict[str, torch.Tensor]] = []

    def _update(self, body: dict, before_reading: object) -> str | None:
        orders = [
            json.loads(pickle.loads(base64.b64decode(payload))[0][0])
            for payload in body["serialized_named_tensors"]
        ]
        assert len(orders) == 2 and orders[0] == orders[1], "all ranks read the same object"
        self.seen.append(sorted(os.listdir(self.folder)))
        wire = read_links(orders[0]["from"], size_bytes=orders[0]["wire"])
        self.loaded.append(
            {
                name: wire[first:end].view(getattr(torch, dtype)).view(shape)
                for name, shape, dtype, [[_, first, end, _, _]] in orders[0]["tensors"]
            }
        )
        return None


def opened(folder: Path, engine: SlowEngine) -> StoreChannel:
    channel = StoreChannel(timeout_s=60)
    channel.place = StoreUrl(folder.as_uri(), instead="--to DIR")
    channel.open([EngineAddress(url=engine.url, tp=2, sharing_ranks=[])])
    return channel


def test_whole_tensors_are_one_object_each_bucket_and_are_removed_once_read(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "rank0-left-by-a-kill").touch()
    (folder / "rank1-of-another").touch()
    engine = ReadingEngine(folder)
    channel = opened(folder, engine)
    channel.send(buckets())
    channel.close()
    engine.close()
    for index, loaded in enumerate(engine.loaded):
        assert torch.equal(loaded["w"], torch.full((1000,), float(index)))
        assert torch.equal(loaded["b"], torch.full((3,), -1.0))
    assert len(engine.loaded) == NUM_BUCKETS
    own = [[name for name in names if name.startswith("rank0-")] for names in engine.seen]
    assert all(1 <= len(names) <= 2 for names in own)
    assert len({name for names in own for name in names}) == NUM_BUCKETS
    assert os.listdir(folder) == ["rank1-of-another"]
    assert channel.sent_bytes >= NUM_BUCKETS * 4012


def test_after_a_failure_nothing_more_is_written_until_the_next_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, written = tmp_path / "weights", list[str]()
    folder.mkdir()
    engine = ReadingEngine(folder)
    channel = opened(folder, engine)
    write = ObjectStore.write

    def full_at_the_second(store: ObjectStore, name: str, data: bytes) -> None:
        written.append(name)
        if len(written) == 2:
            raise StoreError("the store is full", why="for once", fix="--to DIR")
        write(store, name, data)

    monkeypatch.setattr(ObjectStore, "write", full_at_the_second)
    with pytest.raises(StoreError, match="the store is full"):
        channel.send(buckets())
    assert len(written) == 2 and os.listdir(folder) == []
    channel.send(buckets())
    channel.close()
    engine.close()
    assert len(written) == 2 + NUM_BUCKETS and len(engine.loaded) == 1 + NUM_BUCKETS


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    engine = ReadingEngine(folder)
    channel = opened(folder, engine)
    folder.rmdir()
    folder.touch()
    with pytest.raises(StoreError, match="does not answer as it should") as caught:
        channel.send(buckets())
    channel.close()
    engine.close()
    assert caught.value.fixes[-1] == "--to DIR"
    assert not engine.loaded
