"""What the ranks of a layout send in pieces, put together again; and pieces into a real engine."""

from __future__ import annotations

import hashlib
import os
import signal
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from milescli.backends.stores.store import StoreUrl
from milescli.core.errors import MilesError, MismatchError
from milescli.weights.shards import Part, Shard, whole

if TYPE_CHECKING:
    from milescli.backends.megatron.worker import TrainerRank
    from milescli.backends.sglang.weights.channels import DistributedChannel


def shard_checksums(made: TrainerRank) -> dict[str, Any] | None:
    """SHA-256 of each tensor that its senders' boxes make up, as `parameter_checksums` says it; the
    boxes cover it, and no two of them have an element in common. None where nothing is sent in
    shards."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    checksums = {}
    sent = made.policy.shards_for_engines([range(size)])
    if sent is None:
        return None
    for shards in sent:
        own = [_as_bytes(each.tensor) if made.rank in each.senders else None for each in shards]
        everyones = [own] * size
        if size > 1:
            dist.all_gather_object(everyones, own)
        for name in dict.fromkeys(each.part.name for each in shards):
            mine = [(at, each) for at, each in enumerate(shards) if each.part.name == name]
            shape, dtype = mine[0][1].part.shape, mine[0][1].part.dtype
            joined = torch.empty(shape, dtype=dtype)
            boxes = [each.part.box for _, each in mine]
            assert sum(box.num_elements for box in boxes) == joined.numel(), (name, boxes)
            assert not any(one.common(two) for one, two in combinations(boxes, 2)), name
            for at, each in mine:
                (sender,) = each.senders
                assert sender in each.part.owners
                joined[each.part.box.within(whole(shape))] = _from_bytes(
                    everyones[sender][at], each.part
                )
            checksums[name] = hashlib.sha256(
                joined.contiguous().view(-1).view(torch.uint8).numpy()
            ).hexdigest()
    return checksums


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """torch does not pickle float8 between all processes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone()


def _from_bytes(raw: torch.Tensor, part: Part) -> torch.Tensor:
    return raw.view(part.dtype).view(part.box.shape)


def published_in_shards(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    engines: list[dict],
    way: str,
    folder: str,
    victim: int | None = None,
    has_biases: bool = False,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The weights of a folder in shards into real engines, by way of `folder` (or a URL) where it
    needs one; then whole, by which the engines are
    verified bit for bit. Says the bytes that engine ranks fetched, those of the model, and what
    the next publish raises where rank 0 has killed the process group `victim` before."""
    from milescli.backends.sglang.weights import channels, read_channels, store_channel
    from milescli.core.types import EngineAddress
    from tests.backends.megatron.harness import trainer

    os.environ.update(environment or {})
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout)
    (module,) = [one for one in (channels, read_channels, store_channel) if _defines(one, way)]
    channel = getattr(module, way)(timeout_s=120)
    is_pushed = issubclass(type(channel), channels.PushChannel)
    channel.full_every = 100
    channel.place = StoreUrl(folder, instead="") if "://" in folder else folder
    channel.open([EngineAddress(**engine) for engine in engines])
    shards = made.policy.shards_for_engines(channel.groups)
    assert shards is not None
    channel.send(shards)
    fetched = {name: [*counts] for name, counts in channel.fetched.items()}
    # keeps what it holds, is sent all weights whole, and compares
    channel.verify(made.policy.buckets_for_engines(for_check=True))
    channel.verify(made.policy.shards_for_engines(channel.groups, for_check=True))
    whole_bytes = sum(
        tensor.nbytes for bucket in made.policy.buckets_for_engines() for _, tensor in bucket
    )
    sent, failure = [0], None
    if not is_pushed and not has_biases:
        buckets = made.policy.shards_for_engines(channel.groups, for_check=True)
        with pytest.raises(MismatchError, match=r"took nothing of 1 tensors: .*o_proj\.bias"):
            channel.verify(_with_a_bias(shards) for shards in buckets)
    if is_pushed:
        channel.open([EngineAddress(**engine) for engine in engines])
        sent = [_sent(channel, made) for _ in ("all", "nothing")]
        _nudge(made)
        sent.append(_sent(channel, made))
        channel.verify(made.policy.buckets_for_engines(for_check=True))
        channel.verify(made.policy.shards_for_engines(channel.groups, for_check=True))
    if victim is not None:
        if rank == 0:
            os.killpg(victim, signal.SIGKILL)
        dist.barrier()
        try:
            channel.send(made.policy.shards_for_engines(channel.groups))
        except MilesError as error:
            failure = f"{error.what}: {error.why}"
        everyones: list[object] = [None] * size
        dist.all_gather_object(everyones, failure)
        assert len({*everyones}) == 1, everyones
    channel.close()
    dist.barrier()  # each rank has removed its own
    place = folder if "://" in folder else Path(folder).as_uri()
    left = [*StoreUrl(place, instead="").open().sizes()]
    made.close()
    return {
        "fetched": fetched,
        "whole": whole_bytes,
        "sent": sent,
        "failure": failure,
        "left": left,
    }


def _defines(module: Any, name: str) -> bool:
    return getattr(getattr(module, name, None), "__module__", None) == module.__name__


def _with_a_bias(shards: list[Shard]) -> list[Shard]:
    """A bucket that also has, of the first tensor's numbers, a bias that the model has not."""
    first = [shard for shard in shards if shard.part.name == shards[0].part.name]
    name = "model.layers.0.self_attn.o_proj.bias"
    return shards + [replace(shard, part=replace(shard.part, name=name)) for shard in first]


def _sent(channel: DistributedChannel, made: TrainerRank) -> int:
    """Bytes that all ranks publish."""
    before = channel.sent_bytes
    channel.send(made.policy.shards_for_engines(channel.groups))
    sent = torch.tensor(channel.sent_bytes - before)
    dist.all_reduce(sent)
    return int(sent)


@torch.no_grad()
def _nudge(made: TrainerRank) -> None:
    """Move one weight in a hundred to the next number: equally in all copies."""
    for weight in made.policy.weights:
        flat = weight.parameter.view(-1)
        flat[::100] = torch.nextafter(flat[::100], torch.tensor(9.0))
