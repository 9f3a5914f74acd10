"""Shards from every trainer rank to every engine rank that holds them, point to point. Runs inside
trainer ranks, collectively.

An engine's cut is what its own loader takes: it is asked once for each bucket, and answered by all
its ranks (`inside.shards`). Each byte then leaves its sender once for each tree of replicas: the
first engines are sent to, and pass on what they received to the next ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from milescli.backends.sglang.client.http import Orders, Reply
from milescli.backends.sglang.inside.shards import CUTS, SHARDS_FORMAT
from milescli.backends.sglang.weights.group import WeightGroup
from milescli.backends.sglang.weights.shared_tensor import plain_payload
from milescli.weights.shards import Box, Shards

_ALIGNED = 16
"""Bytes: each piece of a message starts at a multiple of it, so that its numbers can be viewed."""

Cut = list[tuple[int, Box]]
"""(number of a tensor in its bucket, box) of each piece that an engine rank takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a message."""

    shard: int
    """Number of the shard in its bucket."""
    box: Box
    """In the whole tensor."""
    start: int
    """First byte in the engine rank's memory."""
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """What one engine rank is sent of a bucket; the same for all replicas."""

    of_sender: dict[int, list[Piece]]
    """Trainer rank -> its pieces, in order; senders follow one another in the rank's memory."""
    size_bytes: int

    def span(self, sender: int) -> tuple[int, int]:
        """Return the first byte of a sender's message, and one past its last."""
        pieces = self.of_sender[sender]
        return pieces[0].start, _up(pieces[-1].end)


def messages_of(shards: Shards, cut: Cut) -> Messages:
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
    of_sender: dict[int, list[Piece]] = {}
    at = 0
    for sender in sorted(found):
        for number, box, size in found[sender]:
            piece = Piece(shard=number, box=box, start=at, end=at + size)
            of_sender.setdefault(sender, []).append(piece)
            at = _up(piece.end)
    return Messages(of_sender=of_sender, size_bytes=at)


def _key(shards: Shards) -> int:
    return hash(tuple((shard.part.name, shard.part.box, shard.senders) for shard in shards))


def _up(position: int) -> int:
    return -(-position // _ALIGNED) * _ALIGNED


class Pusher:
    """Sends the shards of one channel."""

    def __init__(self, orders: Orders, *, backend: str, host: str) -> None:
        """Join all trainer ranks and all engine ranks in one group. Collective: raises WorkerDied
        or WaitTimeout on all ranks, or on none."""
        self._orders = orders
        self._tp = max(engine.tp for engine in orders.engines)
        assert all(engine.tp == self._tp for engine in orders.engines), orders.engines
        self._num_ranks = dist.get_world_size()
        self._rank = dist.get_rank()
        self._group = WeightGroup(
            orders, backend=backend, host=host, rank=self._rank, num_trainers=self._num_ranks
        )
        self._messages: dict[int, list[Messages]] = {}
        """Bucket -> [engine rank]"""
        self._sending: list[tuple[Any, torch.Tensor]] = []

    @property
    def num_trees(self) -> int:
        """Return how many engines are sent to directly: as many as trainer ranks can serve without
        sending more than engine ranks receive."""
        return max(1, min(len(self._orders.engines), self._num_ranks // self._tp))

    def knows(self, shards: Shards) -> bool:
        """Return True if the engines have said what they take of a bucket of these parts."""
        return _key(shards) in self._messages

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
        replies = self._orders.finish(self.order([order] * self._tp))
        answers = [str(reply.get("message", "")).partition(CUTS)[2] for reply in replies]
        assert all(answer == answers[0] for answer in answers), "replicas hold different cuts"
        return [
            [(number, Box(start=tuple(start), shape=tuple(shape))) for number, start, shape in cut]
            for cut in json.loads(answers[0])
        ]

    def learn(self, shards: Shards, cuts: list[Cut]) -> None:
        """Plan the messages of the next bucket. On every rank."""
        self._messages[_key(shards)] = [messages_of(shards, cut) for cut in cuts]

    def flats(self, shards: Shards) -> list[tuple[int, torch.Tensor]]:
        """Return (engine rank, [bytes] uint8) of this rank's messages of a bucket."""
        made = list[tuple[int, torch.Tensor]]()
        for engine_rank, messages in enumerate(self._messages[_key(shards)]):
            if self._rank not in messages.of_sender:
                continue
            first, end = messages.span(self._rank)
            flat: torch.Tensor | None = None
            for piece in messages.of_sender[self._rank]:
                shard = shards[piece.shard]
                assert shard.tensor is not None, (shard.part.name, self._rank)
                numbers = shard.tensor[piece.box.within(shard.part.box)]
                if flat is None:
                    flat = torch.zeros(end - first, dtype=torch.uint8, device=numbers.device)
                flat[piece.start - first : piece.end - first].copy_(
                    numbers.contiguous().reshape(-1).view(torch.uint8)
                )
            assert flat is not None
            made.append((engine_rank, flat))
        return made

    def send(self, flats: list[tuple[int, torch.Tensor]]) -> None:
        """Send this rank's messages to the first engine of each tree. What was sent before has
        arrived."""
        self._sending = [
            (self._group.send(flat, self._place(engine, engine_rank)), flat)
            for engine_rank, flat in flats
            for engine in range(self.num_trees)
        ]

    def begin(self, shards: Shards) -> list[Reply]:
        """Let all engines receive a bucket and load it. On rank 0 alone."""
        kinds = {shard.part.name: shard.part for shard in shards}
        bodies = []
        for engine in range(len(self._orders.engines)):
            orders = []
            for engine_rank, messages in enumerate(self._messages[_key(shards)]):
                senders = messages.of_sender
                spans = [[sender, *messages.span(sender)] for sender in senders]
                if engine >= self.num_trees:  # all of it, from the engine before it in its tree
                    above = self._above(engine)
                    spans = [[self._place(above, engine_rank), 0, messages.size_bytes]]
                boxes: dict[str, list[object]] = {name: [] for name in kinds}
                for pieces in senders.values():
                    for piece in pieces:
                        boxes[shards[piece.shard].part.name].append(
                            [0, piece.start, piece.end, piece.box.start, piece.box.shape]
                        )
                orders.append(
                    {
                        "group": self._group.name,
                        "bytes": messages.size_bytes,
                        "from": spans,
                        "to": [
                            self._place(each, engine_rank)
                            for each in range(self.num_trees, len(self._orders.engines))
                            if self._above(each) == engine
                        ],
                        "tensors": [
                            [
                                name,
                                part.shape,
                                str(part.dtype).removeprefix("torch."),
                                boxes[name],
                            ]
                            for name, part in kinds.items()
                        ],
                    }
                )
            bodies.append(orders)
        return self.order(*bodies)

    def order(self, *of_engines: list[dict[str, object]]) -> list[Reply]:
        """Give each engine its orders, one for each of its ranks; all the same ones if there is
        but one list."""
        engines = self._orders.engines
        lists = of_engines if len(of_engines) == len(engines) else of_engines * len(engines)
        return self._orders.begin_all(
            "/update_weights_from_tensor",
            [
                {
                    "serialized_named_tensors": [
                        plain_payload([(json.dumps(order), [])]) for order in orders
                    ],
                    "load_format": SHARDS_FORMAT,
                    "flush_cache": False,
                    "disable_draft_model": engine.has_own_draft,
                }
                for engine, orders in zip(engines, lists, strict=True)
            ],
        )

    def _above(self, engine: int) -> int:
        """The engine that passes on to this one: each passes on to two of its tree."""
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
