"""Shards from every trainer rank to every engine rank that holds them, each its own cut. Runs
inside trainer ranks, collectively.

An engine's cut is what its own loader takes: it is asked once for each bucket, and answered by all
its ranks (`inside.shards`). Messages go point to point (`GroupRoute`), or through an object store
(`weights.store`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from milescli.backends.sglang.client.http import Orders, Reply
from milescli.backends.sglang.inside.shards import CUTS, SHARDS_FORMAT
from milescli.backends.sglang.weights.group import WeightGroup
from milescli.backends.sglang.weights.shared_tensor import plain_payload
from milescli.core.silence import sounds_like_lost_peer
from milescli.weights.delta import Delta, Words, encode
from milescli.weights.shards import Box, Shards

_ALIGNED = 16
"""Each piece of a message starts at a multiple of this many bytes, so that its numbers can be
viewed."""
LARGEST_SHARE = 0.5
"""Share of a message's bytes: if the changes take more, all numbers are sent."""

Cut = list[tuple[int, Box]]
"""(number of a tensor in its bucket, box) of each piece that an engine rank takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A piece of a message."""

    shard: int
    """Number of the shard in its bucket."""
    box: Box
    """Box in the whole tensor."""
    start: int
    """First byte in the engine rank's memory."""
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What one engine rank gets of a bucket; the same for all replicas."""

    of_sender: dict[int, list[Extent]]
    """Trainer rank -> its pieces, in order; senders follow one another in the rank's memory."""
    size_bytes: int

    def span(self, sender: int) -> tuple[int, int]:
        """Return the first byte of a sender's message, and one past its last."""
        pieces = self.of_sender[sender]
        return pieces[0].start, _up(pieces[-1].end)


def delivery_of(shards: Shards, cut: Cut) -> Delivery:
    """Return who sends an engine rank which pieces of its cut. Pure."""
    names = list(dict.fromkeys(shard.part.name for shard in shards))
    wanted: dict[str, list[Box]] = {}
    for number, box in cut:
        boxes = wanted.setdefault(names[number], [])
        if box not in boxes:
            boxes.append(box)
    found: dict[int, list[tuple[int, Box, int]]] = {}
    for number, shard in enumerate(shards):
        for box in wanted.get(shard.part.name, ()):
            if (common := shard.part.box.common(box)) is not None:
                size = common.num_elements * shard.part.dtype.itemsize
                found.setdefault(shard.senders[0], []).append((number, common, size))
    of_sender: dict[int, list[Extent]] = {}
    at = 0
    for sender in sorted(found):
        for number, box, size in found[sender]:
            piece = Extent(shard=number, box=box, start=at, end=at + size)
            of_sender.setdefault(sender, []).append(piece)
            at = _up(piece.end)
    return Delivery(of_sender=of_sender, size_bytes=at)


def _key(shards: Shards) -> int:
    return hash(tuple((shard.part.name, shard.part.box, shard.senders) for shard in shards))


def _up(position: int) -> int:
    return -(-position // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Describes what one rank sends to one rank of each engine."""

    engine_rank: int
    size_bytes: int
    """Bytes on the wire."""
    delta: Delta | None
    """How the changes are coded; None: all numbers are sent."""
    link: str | None
    """URL from which engine ranks read it; None: they receive it from the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """Holds what one rank sends to one rank of each engine."""

    engine_rank: int
    wire: Tensor
    """[bytes] uint8"""
    delta: Delta | None

    def described(self, link: str | None = None) -> Sent:
        """Return what the receiver has to know. `link`: as in `Sent`."""
        size_bytes = self.wire.numel()
        return Sent(
            engine_rank=self.engine_rank, size_bytes=size_bytes, delta=self.delta, link=link
        )


_NEWEST: WeakValueDictionary[tuple[int, int], Words] = WeakValueDictionary()
"""(bucket, engine rank) -> the words that this process sent last, by whatever channel."""


def _shared(place: tuple[int, int], new: Words, *, but: Words | None) -> Words:
    """Return `new`, or what another channel sent just before, which is the same: channels of waves
    hold one copy of a publish together. `but`: what this channel sent itself."""
    newest = _NEWEST.get(place)
    if newest is None or newest is but or not np.array_equal(newest, new):
        newest = _NEWEST[place] = new
    return newest


class Route(Protocol):
    """Carries messages from trainer ranks to engine ranks."""

    name: str
    """Name under which engine ranks keep what came along the route."""

    def hops(self, engine: int, engine_rank: int, order: Mapping[str, Any]) -> dict[str, object]:
        """Return what an order for one rank of one engine adds to that for this rank of every
        engine: from whom it receives, and to whom it passes the data on."""
        ...

    def forget(self) -> None:
        """Free what was sent: it has arrived, or never will."""

    def close(self) -> None:
        """Leave the engines."""


class GroupRoute:
    """Sends point to point in a process group of all trainer ranks and all engine ranks. Each byte
    leaves its sender once for each tree of replicas: the first engines are sent to, and pass on
    what they received to the next ones."""

    def __init__(self, orders: Orders, *, backend: str, host: str) -> None:
        """Form the group. Collective: raises WorkerDied or WaitTimeout on all ranks, or on
        none."""
        self._num_engines, self._tp = len(orders.engines), orders.engines[0].tp
        self._num_ranks = dist.get_world_size()
        self._group = WeightGroup(
            orders, backend=backend, host=host, rank=dist.get_rank(), num_trainers=self._num_ranks
        )
        self.name = self._group.name
        self._sending: list[tuple[Any, Tensor]] = []

    @property
    def num_trees(self) -> int:
        """Return how many engines are sent to directly: as many as trainer ranks can serve without
        sending more than engine ranks receive."""
        return max(1, min(self._num_engines, self._num_ranks // self._tp))

    def send(self, messages: list[Outgoing]) -> int:
        """Send this rank's messages to the first engine of each tree; the number of bytes. What was
        sent before has arrived. An engine that has died is passed over: its order, which rank 0
        gives next, fails and names it."""
        self._sending = []
        for each, engine in product(messages, range(self.num_trees)):
            try:
                work = self._group.send(each.wire, self._place(engine, each.engine_rank))
            except RuntimeError as error:
                if not sounds_like_lost_peer(str(error)):
                    raise
            else:
                self._sending.append((work, each.wire))
        return self.num_trees * sum(each.wire.numel() for each in messages)

    def hops(self, engine: int, engine_rank: int, order: Mapping[str, Any]) -> dict[str, object]:
        """Return from whom an engine rank receives, and to whom it passes the data on."""
        below = [
            self._place(each, engine_rank)
            for each in range(self.num_trees, self._num_engines)
            if self._above(each) == engine
        ]
        if not order["wire"]:  # it holds nothing of the bucket but padding
            return {"to": []}
        if engine < self.num_trees:
            return {"to": below}
        above = self._place(self._above(engine), engine_rank)
        return {"from": [[above, 0, order["wire"]]], "to": below}

    def _above(self, engine: int) -> int:
        """Return the engine that passes on to this one: each passes on to two of its tree."""
        tree, place = engine % self.num_trees, engine // self.num_trees
        return (place - 1) // 2 * self.num_trees + tree

    def _place(self, engine: int, engine_rank: int) -> int:
        return self._num_ranks + engine * self._tp + engine_rank

    def forget(self) -> None:
        """Free what was sent, which has arrived, or never will."""
        self._sending = []

    def close(self) -> None:
        """Leave the group."""
        self.forget()
        self._group.close()


def begin_same(orders: Orders, order: Mapping[str, object]) -> list[Reply]:
    """Give every rank of every engine the same order of `inside.shards`."""
    return begin_each(orders, [[order] * engine.tp for engine in orders.engines])


def begin_each(orders: Orders, of_engines: Sequence[Sequence[Mapping[str, object]]]) -> list[Reply]:
    """Give each rank of each engine an order of `inside.shards`. `of_engines`: [engine][rank]."""
    bodies = [
        {
            "serialized_named_tensors": [
                plain_payload([(json.dumps(order), [])]) for order in of_ranks
            ],
            "load_format": SHARDS_FORMAT,
            "flush_cache": False,
            "disable_draft_model": engine.has_own_draft,
        }
        for engine, of_ranks in zip(orders.engines, of_engines, strict=True)
    ]
    return orders.begin_all("/update_weights_from_tensor", bodies)


class Pusher:
    """Plans and codes the messages of one channel, and tells engines what arrives."""

    def __init__(self, orders: Orders, route: Route, *, full_every: int) -> None:
        """Send along `route`. Every `full_every`-th publish sends all numbers, the others what
        changed."""
        self._orders, self._route = orders, route
        assert len({engine.tp for engine in orders.engines}) == 1, orders.engines
        self._rank = dist.get_rank()
        self._deliveries: dict[int, list[Delivery]] = {}
        """Bucket -> [engine rank]"""
        self._full_every, self._number, self._is_full = full_every, 0, True
        self._last: dict[tuple[int, int], Words] = {}
        """(bucket, engine rank) -> the words of the message that was sent last."""

    def knows(self, shards: Shards) -> bool:
        """Return True if the engines have said what they take of a bucket of these parts."""
        return _key(shards) in self._deliveries

    def ask(self, shards: Shards) -> list[Cut]:
        """Return what each rank of an engine takes of a bucket. On rank 0 alone. Raises WorkerDied,
        WaitTimeout, or EngineRefused."""
        kinds = {shard.part.name: shard.part for shard in shards}
        order = {
            "record": [
                [part.name, part.shape, str(part.dtype).removeprefix("torch.")]
                for part in kinds.values()
            ]
        }
        replies = self._orders.finish(begin_same(self._orders, order))
        answers = [str(reply.get("message", "")).partition(CUTS)[2] for reply in replies]
        assert all(answer == answers[0] for answer in answers), "replicas hold different cuts"
        return [
            [(number, Box(start=tuple(start), shape=tuple(shape))) for number, start, shape in cut]
            for cut in json.loads(answers[0])
        ]

    def learn(self, shards: Shards, cuts: list[Cut]) -> None:
        """Plan the messages of the next bucket. On every rank."""
        self._deliveries[_key(shards)] = [delivery_of(shards, cut) for cut in cuts]

    def begin_publish(self) -> None:
        """Decide whether this publish sends all numbers, or what changed of them."""
        self._is_full = self._number % self._full_every == 0
        self._number += 1

    def begin_check(self) -> None:
        """Send what changed since the last publish: nothing, and the engines load what they
        keep."""
        self._is_full = False

    def messages(self, shards: Shards) -> list[Outgoing]:
        """Return what this rank sends of a bucket."""
        key = _key(shards)
        return [
            self._encoded_message((key, engine_rank), flat)
            for engine_rank, flat in self._flats(shards, self._deliveries[key])
        ]

    def _flats(self, shards: Shards, deliveries: list[Delivery]) -> Iterator[tuple[int, Tensor]]:
        """Yield (engine rank, [bytes] uint8) of this rank's messages."""
        for engine_rank, delivery in enumerate(deliveries):
            if self._rank not in delivery.of_sender:
                continue
            first, end = delivery.span(self._rank)
            flat: Tensor | None = None
            for piece in delivery.of_sender[self._rank]:
                shard = shards[piece.shard]
                assert shard.tensor is not None, (shard.part.name, self._rank)
                numbers = shard.tensor[piece.box.within(shard.part.box)]
                if flat is None:
                    flat = torch.zeros(end - first, dtype=torch.uint8, device=numbers.device)
                flat[piece.start - first : piece.end - first].copy_(
                    numbers.contiguous().reshape(-1).view(torch.uint8)
                )
            assert flat is not None
            yield engine_rank, flat

    def _encoded_message(self, place: tuple[int, int], flat: Tensor) -> Outgoing:
        """Return the whole message, or what changed since the last publish, if that is much
        smaller."""
        if self._full_every == 1:
            return Outgoing(engine_rank=place[1], wire=flat, delta=None)
        new = flat.cpu().numpy().view(np.int16)
        old = self._last.get(place)
        new = self._last[place] = _shared(place, new, but=old)
        if not self._is_full and old is not None:
            delta, raw = encode(old, new)
            if len(raw) <= LARGEST_SHARE * flat.numel():
                # a message without a byte is none
                wire = torch.from_numpy(raw if len(raw) else np.zeros(1, np.uint8))
                return Outgoing(engine_rank=place[1], wire=wire.to(flat.device), delta=delta)
        return Outgoing(engine_rank=place[1], wire=flat, delta=None)

    def begin(self, shards: Shards, everyones: list[list[Sent]]) -> list[Reply]:
        """Let all engines receive a bucket and load it. `everyones`: [trainer rank] what it sends.
        On rank 0 alone."""
        key = _key(shards)
        sent = {
            (rank, each.engine_rank): each for rank, some in enumerate(everyones) for each in some
        }
        common = [
            self._order_of(engine_rank, delivery, shards, sent) | {"bucket": key}
            for engine_rank, delivery in enumerate(self._deliveries[key])
        ]
        return begin_each(
            self._orders,
            [
                [
                    order | self._route.hops(engine, engine_rank, order)
                    for engine_rank, order in enumerate(common)
                ]
                for engine in range(len(self._orders.engines))
            ],
        )

    def _order_of(
        self,
        engine_rank: int,
        delivery: Delivery,
        shards: Shards,
        sent: Mapping[tuple[int, int], Sent],
    ) -> dict[str, Any]:
        """Return what arrives at a rank of any engine, and where its numbers are."""
        kinds = {shard.part.name: shard.part for shard in shards}
        boxes: dict[str, list[object]] = {name: [] for name in kinds}
        sources, parts, at = list[object](), [], 0
        for sender, pieces in delivery.of_sender.items():
            message = sent[sender, engine_rank]
            delta = asdict(message.delta) if message.delta is not None else None
            source = sender if message.link is None else message.link
            sources.append([source, at, at + message.size_bytes])
            parts.append([at, at + message.size_bytes, *delivery.span(sender), delta])
            at += message.size_bytes
            for piece in pieces:
                boxes[shards[piece.shard].part.name].append(
                    [0, piece.start, piece.end, piece.box.start, piece.box.shape]
                )
        return {
            "group": self._route.name,
            "bytes": delivery.size_bytes,
            "wire": at,
            "from": sources,
            "parts": parts,
            "keep": self._full_every > 1,
            "tensors": [
                [name, part.shape, str(part.dtype).removeprefix("torch."), boxes[name]]
                for name, part in kinds.items()
            ],
        }

    def forget(self, *, has_failed: bool) -> None:
        """Free what was sent, which has arrived, or never will: then the next publish sends all
        numbers."""
        self._route.forget()
        if has_failed:
            self._last.clear()

    def close(self) -> None:
        """Leave the engines."""
        self.forget(has_failed=True)
        self._route.close()
