"""Trainer rank RANK of two, whose two buffers feed one slow engine of two ranks: `python -m
tests.backends.sglang.weights.two_ranks RANK PORT`. Rank 0 holds the engine and prints what
happened, as JSON."""

from __future__ import annotations

import errno
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from milescli.backends.sglang.weights import shared_tensor
from milescli.backends.sglang.weights.channels import TensorChannel
from milescli.core.errors import MilesError
from milescli.core.types import EngineAddress
from tests.backends.sglang.launch.slow_engine import SlowEngine

NUM_BUCKETS = 6
REFUSED = 2


def buckets(rank: int):
    """Bucket i of rank r is full of 10 r + i."""
    for index in range(NUM_BUCKETS):
        own = torch.full((1000,), 10 * rank + index, dtype=torch.uint8)
        yield [("w", own.view(torch.float32))]


def dawdle(index: int) -> None:
    """Long enough for the other rank to run ahead, if nothing holds it."""
    time.sleep(0.05)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def publish(rank: int, before_reading) -> dict[str, object]:
    engine = SlowEngine(before_reading) if rank == 0 else None
    urls = [engine.url if engine else ""]
    dist.broadcast_object_list(urls, src=0)
    channel = TensorChannel(timeout_s=60)
    channel.open([EngineAddress(url=urls[0], tp=2, sharing_ranks=[0, 1])])
    failure = None
    try:
        channel.send(buckets(rank))
    except MilesError as error:
        failure = error.why
    channel.close()
    read = (
        [[sorted(set(flat.tolist())) for flat in bucket] for bucket in engine.read]
        if engine
        else []
    )
    return {"read": read, "failure": failure, "orders": engine.orders if engine else []}


def main() -> None:
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    whole = publish(rank, dawdle)
    cut_short = publish(rank, lambda index: "no room" if index == REFUSED else None)
    if rank == 1:
        shared_tensor.ROOM_WITHIN_S = 0.0
        os.pwrite = full
    no_room = publish(rank, dawdle)
    print(json.dumps({"whole": whole, "cut_short": cut_short, "no_room": no_room}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
