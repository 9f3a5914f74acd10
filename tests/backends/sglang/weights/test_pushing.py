"""Which pieces each trainer rank sends to an engine rank."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.backends.sglang.weights import pushing
from milescli.backends.sglang.weights.pushing import GroupRoute, Outgoing, delivery_of
from milescli.weights.shards import Box, Part, Shard, whole
from tests.weights.test_shards import cut_at_random


@st.composite
def tensors(draw) -> list[tuple[str, tuple[int, int], list[Box], Box]]:
    """(name, shape, boxes that senders hold, the box that the engine rank takes)"""
    made = []
    for number in range(draw(st.integers(1, 4))):
        shape = (draw(st.integers(1, 8)), draw(st.integers(1, 8)))
        boxes = cut_at_random(whole(shape), draw)
        taken = draw(st.sampled_from(cut_at_random(whole(shape), draw)))
        made.append((f"w{number}", shape, boxes, taken))
    return made


@given(tensors(), st.data())
def test_each_number_of_a_cut_arrives_once(tensors, data):
    full = {name: torch.rand(shape) for name, shape, _, _ in tensors}
    shards = [
        Shard(
            part=Part(name=name, shape=shape, dtype=torch.float32, box=box, owners=(0, 1, 2)),
            senders=(data.draw(st.integers(0, 2)),),
            tensor=None,
        )
        for name, shape, boxes, _ in tensors
        for box in boxes
    ]
    cut = [(number, taken) for number, (_, _, _, taken) in enumerate(tensors)]
    delivery = delivery_of(shards, cut + cut[:1])  # a loader may take the same twice
    arrived = {name: torch.full(shape, -1.0) for name, shape, _, _ in tensors}
    spans = [delivery.span(sender) for sender in delivery.of_sender]
    assert spans == sorted(spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for sender, pieces in delivery.of_sender.items():
        for piece in pieces:
            shard = shards[piece.shard]
            assert shard.senders == (sender,)
            assert piece.end - piece.start == 4 * piece.box.num_elements
            assert delivery.span(sender)[0] <= piece.start < piece.end <= delivery.size_bytes
            place = arrived[shard.part.name][piece.box.within(whole(shard.part.shape))]
            assert (place == -1).all(), "sent twice"
            place.copy_(full[shard.part.name][piece.box.within(whole(shard.part.shape))])
    for name, shape, _, taken in tensors:
        inside = taken.within(whole(shape))
        assert torch.equal(arrived[name][inside], full[name][inside])
        assert int((arrived[name] != -1).sum()) == taken.num_elements


class Group:
    """A process group whose rank 2 has died."""

    name = "weights"

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.sent: list[int] = []

    def send(self, flat: torch.Tensor, to: int) -> object:
        if to == 2:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1")
        self.sent.append(to)
        return object()


def test_an_engine_that_died_before_it_was_sent_anything_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order that it is given next fails, and names it."""
    group = Group()
    monkeypatch.setattr(pushing, "WeightGroup", lambda *_, **__: group)
    monkeypatch.setattr(pushing.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(pushing.dist, "get_rank", lambda: 0)
    engines = [SimpleNamespace(tp=1), SimpleNamespace(tp=1)]
    route = GroupRoute(SimpleNamespace(engines=engines), backend="gloo", host="")  # type: ignore[arg-type]
    wire = torch.zeros(4, dtype=torch.uint8)
    message = Outgoing(engine_rank=0, wire=wire, delta=None)
    assert route.send([message]) == 8
    assert group.sent == [3]
