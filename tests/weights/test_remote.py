"""Pieces of weights that are read from elsewhere, and what is read of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.weights.remote import ReceiveBuffer, RemoteMemory, runs


class Copier:
    """Reads tensors of this process by their name."""

    def __init__(self, **memories: torch.Tensor) -> None:
        self.memories = {name: flat.view(-1).view(torch.uint8) for name, flat in memories.items()}
        self.read_bytes = self.made = self.forgotten = 0

    def memory_for(self, size_bytes: int) -> torch.Tensor:
        self.made += 1
        return torch.full((size_bytes,), 255, dtype=torch.uint8)

    def forget(self, memory: torch.Tensor) -> None:
        self.forgotten += 1

    def read(self, memory: str, runs: Sequence[tuple[int, int, int]], into: torch.Tensor) -> None:
        for first, place, size in runs:
            into[place : place + size] = self.memories[memory][first : first + size]
            self.read_bytes += size


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    firsts = [draw(st.integers(0, size - 1)) for size in shape]
    ends = [draw(st.integers(first + 1, size)) for first, size in zip(firsts, shape, strict=True)]
    return shape, tuple(map(slice, firsts, ends))


@given(cuts(), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]), st.booleans())
def test_an_index_of_a_box_reads_what_it_would_of_a_tensor(cut, dtype, has_long_rows) -> None:
    shape, index = cut
    if has_long_rows and shape:  # then much lies between runs, which are read one by one
        shape, index = (shape[0], 2**15), (index[0], slice(0, 2**14))
    ahead = 3 * dtype.itemsize
    numbers = torch.arange(prod(shape)).to(dtype).view(shape)
    reader = Copier(rank=torch.cat([torch.zeros(3, dtype=dtype), numbers.view(-1)]))
    buffer = ReceiveBuffer(reader)
    buffer.begin(2 * numbers.nbytes)
    box = RemoteMemory("rank", buffer).box(ahead, dtype=dtype, shape=shape)
    wanted = numbers[index]
    assert torch.equal(box[index], wanted)
    starts, length = runs(shape, [(each.start, each.stop) for each in index])
    assert len(starts) * length == wanted.numel()
    if has_long_rows:
        assert reader.read_bytes == wanted.nbytes, "nothing between the runs"
    assert reader.read_bytes <= numbers.nbytes


def test_memory_of_one_order_is_used_by_the_next_and_what_was_lent_beyond_it_is_forgotten() -> None:
    numbers = torch.arange(64, dtype=torch.float32)
    reader = Copier(rank=numbers)
    buffer = ReceiveBuffer(reader)
    everything = (slice(0, 64),)
    for _ in range(3):
        buffer.begin(numbers.nbytes)
        box = RemoteMemory("rank", buffer).box(0, dtype=numbers.dtype, shape=(64,))
        first, again = box[everything], box[everything]
        assert torch.equal(first, numbers) and torch.equal(again, numbers)
    assert (reader.made, reader.forgotten) == (4, 2)
    buffer.begin(2 * numbers.nbytes)
    assert (reader.made, reader.forgotten) == (5, 4)
