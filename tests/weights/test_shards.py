"""Tensors of which only pieces travel: what a view of one fetches, and who sends what."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.weights.shards import (
    PIECES_OF_BOUND,
    Box,
    Part,
    Sharded,
    Source,
    assign,
    cut_to,
    least_busiest,
    whole,
)

CPU = torch.device("cpu")
NO_MORE_THAN = 1.2
"""Times what the busiest rank sends at least."""


@st.composite
def shapes(draw) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))


def cut_at_random(box: Box, draw) -> list[Box]:
    """Boxes that cover it."""
    dim = draw(st.integers(0, len(box.shape) - 1))
    if box.shape[dim] == 1 or draw(st.booleans()):
        return [box]
    at = draw(st.integers(1, box.shape[dim] - 1))
    first, last = box.along(dim, 0, at), box.along(dim, at, box.shape[dim])
    return cut_at_random(first, draw) + cut_at_random(last, draw)


def view_at_random(tensor: torch.Tensor, steps: list[tuple[str, int, int]]) -> torch.Tensor:
    """What a loader may do before it copies; the same steps for any tensor of a shape."""
    for kind, one, two in steps:
        if tensor.dim() == 0:
            break
        dim = one % tensor.dim()
        size = tensor.shape[dim]
        if kind == "narrow" and size:
            start = two % size
            tensor = tensor.narrow(dim, start, 1 + (one + two) % (size - start))
        elif kind == "select" and size:
            tensor = tensor.select(dim, two % size)
        elif kind == "transpose":
            tensor = tensor.transpose(dim, two % tensor.dim())
        elif kind == "chunk":
            tensor = tensor.chunk(1 + two % 3, dim)[0]
        elif kind == "step":
            tensor = tensor[:: 1 + two % 2]
        elif kind == "unsqueeze":
            tensor = tensor.unsqueeze(dim)
        elif kind == "flatten":
            tensor = tensor.reshape(-1)
    return tensor


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["narrow", "select", "transpose", "chunk", "step", "unsqueeze", "flatten"]),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    max_size=5,
)


@given(shapes(), STEPS, st.data())
def test_a_view_of_shards_has_the_numbers_of_the_same_view_of_the_whole(shape, steps, data):
    full = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    boxes = cut_at_random(whole(shape), data.draw)
    source = Source(
        "w",
        shape,
        full.dtype,
        [(box, full[box.within(whole(shape))].clone()) for box in boxes],
        device=full.device,
    )
    expected = view_at_random(full, steps)
    view = view_at_random(Sharded.of(source), steps)
    assert view.shape == expected.shape
    taken = torch.full(expected.shape, -1.0)
    taken.copy_(view)
    assert torch.equal(taken, expected)


def test_a_cut_fetches_what_it_holds_and_no_more():
    full = torch.randn(12, 10)
    halves = [Box(start=(0, 0), shape=(6, 10)), Box(start=(6, 0), shape=(6, 10))]
    source = Source(
        "w",
        (12, 10),
        full.dtype,
        [(box, full[box.within(whole((12, 10)))]) for box in halves],
        device=CPU,
    )
    parameter = torch.nn.Parameter(torch.zeros(3, 10))
    parameter.data.copy_(Sharded.of(source).chunk(4)[1])
    assert torch.equal(parameter.data, full[3:6])
    assert source.fetched == 30
    column = torch.zeros(12, 5)
    column.copy_(Sharded.of(source).narrow(1, 5, 5))
    assert torch.equal(column, full[:, 5:])
    assert source.fetched == 30 + 60


def test_a_rank_of_padding_alone_takes_nothing():
    source = Source("w", (12, 10), torch.float32, [], device=CPU)
    torch.zeros(0, 10).copy_(Sharded.of(source).narrow(0, 12, 0))
    assert source.fetched == 0


def test_what_was_sent_is_not_written():
    whole_box = whole((3, 2))
    source = Source("w", (3, 2), torch.float32, [(whole_box, torch.ones(3, 2))], device=CPU)
    with pytest.raises(TypeError, match=r"w: .*writes into what was sent"):
        Sharded.of(source)[1].add_(1)
    assert torch.equal(Sharded.of(source) + 1, torch.full((3, 2), 2.0))


def test_numbers_that_nobody_sent_are_named():
    half = Box(start=(0, 0), shape=(6, 10))
    source = Source("model.w", (12, 10), torch.float32, [(half, torch.zeros(6, 10))], device=CPU)
    with pytest.raises(ValueError, match=r"model\.w: the shards do not cover"):
        Sharded.of(source)[5:7].clone()


# --- who sends


def part(size: int, owners: tuple[int, ...], name: str = "w") -> Part:
    return Part(name=name, shape=(size,), dtype=torch.uint8, box=whole((size,)), owners=owners)


@given(st.integers(0, 2**32))
def test_the_busiest_rank_sends_little_more_than_it_must(seed):
    """Owners as layouts make them: stages, their data-parallel copies, experts spread over them."""
    rnd = random.Random(seed)
    pp, tp, dp = 2 ** rnd.randint(0, 2), 2 ** rnd.randint(0, 3), 2 ** rnd.randint(0, 3)
    ep = 2 ** rnd.randint(0, 3)
    ranks = pp * tp * dp
    parts = []
    for stage in range(pp):
        here = range(stage * tp * dp, (stage + 1) * tp * dp)
        for _ in range(rnd.randint(1, 6)):
            size = 2 ** rnd.randint(4, 16)
            parts += [
                part(size, tuple(rank for rank in here if rank % tp == cut)) for cut in range(tp)
            ]
            parts.append(part(2 ** rnd.randint(2, 8), tuple(here)))
            parts += [
                part(
                    2 ** rnd.randint(8, 14),
                    tuple(rank for rank in here if rank % min(ep, tp * dp) == expert),
                )
                for expert in range(min(ep, tp * dp))
            ]
    if rnd.random() < 0.5:  # a vocabulary on one stage alone
        parts.append(part(2**18, tuple(range(tp * dp))))
    bound = least_busiest(parts)
    pieces = cut_to(parts, bound / PIECES_OF_BOUND)
    assert sum(each.size_bytes for each in pieces) == sum(each.size_bytes for each in parts)
    senders = assign(pieces, num_ranks=ranks)
    load = [0] * ranks
    for each, sender in zip(pieces, senders, strict=True):
        assert sender in each.owners
        load[sender] += each.size_bytes
    assert max(load) <= NO_MORE_THAN * bound


def test_a_part_of_one_owner_stays_whole():
    alone, shared = part(1000, (0,)), part(1000, (0, 1))
    assert cut_to([alone], 10) == [alone]
    pieces = cut_to([shared], 300)
    assert [piece.box.start for piece in pieces] == [(0,), (250,), (500,), (750,)]
