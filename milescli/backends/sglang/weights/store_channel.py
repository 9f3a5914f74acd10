"""A channel through an object store, for engines that only reach the trainer by way of one. Runs
inside trainer ranks: each puts its messages there, and signs links by which engine ranks read
them, so that engines need no credentials."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from milescli.backends.sglang.weights.channels import PushChannel, rank_here
from milescli.backends.sglang.weights.pushing import Sent, begin_same
from milescli.backends.sglang.weights.read_channels import on_all_ranks, prefix
from milescli.core.errors import MachineError, MilesError
from milescli.core.types import EngineAddress
from milescli.weights.base import Bucket, Slice, layout, write_flat
from milescli.weights.shards import Shard


class Store(Protocol):
    """Keeps objects below one URL. Calls raise MachineError."""

    def sizes(self) -> Mapping[str, int]:
        """Return the bytes of each object, by name."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write an object."""

    def link(self, name: str, *, expires_s: float) -> str:
        """Return a URL by which an object can be read for `expires_s` seconds, without
        credentials."""
        ...

    def remove(self, names: list[str]) -> None:
        """Remove objects; one that is not there counts as removed."""


class StorePlace(Protocol):
    """Names a store that each trainer rank opens for itself."""

    def open(self) -> Store:
        """Return the store. Raises MachineError."""
        ...


SPARE_S = 300.0
"""Seconds that a link stays valid after the time limit of the order that has it."""


@dataclass(slots=True)
class StoreRoute:
    """Keeps the objects of one rank in a store while engines may read them."""

    store: Store
    expires_s: float
    """Seconds for which links are valid."""
    name: str = field(default_factory=lambda: f"miles-store-{secrets.token_hex(4)}")
    _objects: list[list[str]] = field(default_factory=list)
    """Names of the objects of each bucket that may still be read."""
    _to_remove: list[str] = field(default_factory=list)
    """Names of the objects to remove."""

    def put(self, wires: list[Tensor]) -> list[str]:
        """Write an object for each message ([bytes] uint8) of a bucket; return links to them.
        Raises MachineError."""
        self._objects.append([])
        links = []
        for wire in wires:
            name = f"{prefix()}{secrets.token_hex(8)}"
            self._objects[-1].append(name)
            self.store.write(name, wire.cpu().numpy().tobytes())
            links.append(self.store.link(name, expires_s=self.expires_s))
        return links

    def forget_before_last(self) -> None:
        """Remove the objects of all buckets but the last one: engines have read them."""
        self._remove(self._objects[:-1])

    def hops(self, engine: int, engine_rank: int, order: Mapping[str, Any]) -> dict[str, object]:
        """Add nothing: every engine reads the same objects."""
        return {}

    def forget(self) -> None:
        """Remove what is left."""
        self._remove(self._objects)

    def _remove(self, buckets: list[list[str]]) -> None:
        """Remove the objects of buckets, or the next time: a rank that failed here would leave the
        others waiting."""
        self._objects = self._objects[len(buckets) :]
        self._to_remove += [name for names in buckets for name in names]
        with suppress(MachineError):
            self.store.remove(self._to_remove)
            self._to_remove = []

    def close(self) -> None:
        """Remove what is left."""
        self.forget()


class StoreChannel(PushChannel):
    """Sends through objects, those of at most two buckets per rank at a time. Shards are cut as the
    engines take them; whole tensors are one object, of rank 0."""

    place: StorePlace | None = None
    """Where the objects of this run are."""

    def __init__(self, **settings: Any) -> None:
        """Accept the settings of every channel."""
        super().__init__(**settings)
        self._route: StoreRoute | None = None
        self._slices: list[Slice] = []
        """Where each whole tensor lies in the object of the last bucket. On rank 0."""
        self._is_over = False
        """A rank has failed in this publish, and all know it: no more is written."""

    def open(self, engines: list[EngineAddress]) -> None:
        """Open the store. Raises MachineError on all ranks if one cannot reach it."""
        super().open(engines)
        on_all_ranks(self._prepare)

    def _prepare(self) -> None:
        """Open the store, and remove what this rank left there when it was killed."""
        assert self.place is not None, "a store channel needs a store"
        store = self.place.open()
        store.remove([name for name in store.sizes() if name.startswith(prefix())])
        self._route = StoreRoute(store, expires_s=self._timeout_s + SPARE_S)

    def _new_route(self) -> StoreRoute:
        assert self._route is not None, "send before open"
        return self._route

    def _flatten(self, bucket: Any, index: int) -> list[Sent] | MilesError:
        """Put this rank's messages into the store, and say where; or return the error, which rank 0
        raises."""
        if self._is_over:
            return []
        is_whole = not (bucket and isinstance(bucket[0], Shard))
        self._shards = [] if is_whole else bucket
        messages = [] if is_whole else self._messages(bucket)
        if isinstance(messages, MilesError):
            return messages
        try:
            if not is_whole:
                links = self._put([message.wire for message in messages])
                pairs = zip(messages, links, strict=True)
                return [message.described(link) for message, link in pairs]
            return [self._put_whole(bucket)] if rank_here() == 0 else []
        except MilesError as error:
            return error

    def _put(self, wires: list[Tensor]) -> list[str]:
        links = self._new_route().put(wires)
        self.sent_bytes += sum(wire.numel() for wire in wires)
        return links

    def _put_whole(self, bucket: Bucket) -> Sent:
        self._slices = layout(bucket)
        flat = torch.empty(self._slices[-1].end, dtype=torch.uint8)
        write_flat(bucket, flat)
        (link,) = self._put([flat])
        return Sent(engine_rank=0, size_bytes=flat.numel(), delta=None, link=link)

    def _free(self) -> None:
        super()._free()
        self._is_over = False
        if self._route is not None:
            self._route.forget()

    def _collect(self, own: list[Sent] | MilesError) -> list[list[Sent] | MilesError]:
        """Return on rank 0 what all ranks put there. No rank goes on before rank 0 arrives: by then
        the bucket before has been read."""
        everyones: list[Any] = [(own, self._failed)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyones *= dist.get_world_size()
            dist.all_gather_object(everyones, (own, self._failed))
        self._is_over = any(failed or isinstance(each, MilesError) for each, failed in everyones)
        self._new_route().forget_before_last()
        return [each for each, _ in everyones]

    def _begin_loading(self, whole: list[list[Sent] | MilesError]) -> None:
        sent = list[list[Sent]]()
        for each in whole:
            if isinstance(each, MilesError):
                raise each
            sent.append(each)
        if self._shards:
            assert self._pusher is not None
            self._loading = self._pusher.begin(self._shards, sent)
        else:
            self._loading = begin_same(self.orders, self._order_of_whole(sent[0][0]))

    def _order_of_whole(self, message: Sent) -> dict[str, object]:
        """Return the order to load the tensors of a whole bucket from one object."""
        tensors = [
            [
                place.name,
                place.shape,
                str(place.dtype).removeprefix("torch."),
                [[0, place.start, place.end, [0] * len(place.shape), place.shape]],
            ]
            for place in self._slices
        ]
        source = [message.link, 0, message.size_bytes]
        return {"tensors": tensors, "from": [source], "wire": message.size_bytes, "keep": False}
