"""Rows of running contexts against attention over SGLang's slots, while requests come and go."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from milescli.backends.sglang.cpu import rows
from milescli.backends.sglang.cpu.rows import ContextRows

HEADS, KV_HEADS, SIZE, REQUESTS, LONGEST = 4, 2, 8, 12, 200
LAYERS = 2


class Engine:
    """Slots and their table as SGLang keeps them, with every context scattered."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        slots = torch.randperm(REQUESTS * LONGEST, generator=generator)
        self.table = slots.view(REQUESTS, LONGEST).to(torch.int32)
        self.caches = torch.zeros(LAYERS, 2, REQUESTS * LONGEST, KV_HEADS, SIZE)
        self.lens = [0] * REQUESTS
        self.rows = ContextRows(self.table, bytes_per_token=LAYERS * 2 * KV_HEADS * SIZE * 4)

    def begin(self, request: int, length: int) -> None:
        """A prefill of so many tokens."""
        slots = self.table[request, :length].long()
        self.caches[:, :, slots] = torch.randn(LAYERS, 2, length, KV_HEADS, SIZE)
        self.lens[request] = length
        self.rows.forget(torch.tensor([request]))

    def step(self, requests: list[int], window: int | None = None) -> bool:
        """One token more for each, compared layer by layer; False where rows were refused."""
        for request in requests:
            self.lens[request] += 1
        lens = torch.tensor([self.lens[request] for request in requests])
        if not self.rows.plan(torch.tensor(requests), lens):
            return False
        for layer, caches in enumerate(self.caches):
            query = torch.randn(len(requests), HEADS, SIZE)
            new = torch.randn(2, len(requests), KV_HEADS, SIZE)
            last = self.table[requests, lens - 1].long()
            caches[:, last] = new
            attended = self.rows.attend(
                layer, query, tuple(new), tuple(caches), scaling=0.3, window=window
            )
            for row, request in enumerate(requests):
                expected = self._alone(query[row], caches, request, window)
                assert torch.allclose(attended[row], expected, atol=1e-5)
        return True

    def _alone(self, query, caches, request: int, window: int | None) -> torch.Tensor:
        length = self.lens[request]
        first = 0 if window is None else max(0, length - 1 - window)
        slots = self.table[request, first:length].long()
        keys, values = (
            kept[slots].transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0) for kept in caches
        )
        return F.scaled_dot_product_attention(query[:, None], keys, values, scale=0.3)[:, 0]


@pytest.mark.parametrize("window", [None, 3])
def test_steps_of_one_batch_attend_to_all_that_came_before(window):
    engine = Engine()
    for request, length in enumerate([5, 1, 17]):
        engine.begin(request, length)
    for _ in range(5):
        assert engine.step([0, 1, 2], window)


def test_requests_come_and_go_and_their_places_are_taken_by_others():
    engine = Engine()
    for request in range(8):
        engine.begin(request, 3 + request)
    engine.step(list(range(8)))
    engine.step([0, 2, 3, 4, 5, 6, 7])  # one ended: its row stays
    engine.step([0, 2, 3, 4, 5, 6, 7])
    engine.step([0, 3, 7])  # most ended: rows are made anew
    engine.begin(1, 9)
    engine.begin(3, 4)  # another request under the number of one that ended, and as long
    engine.step([0, 7, 1, 3])
    engine.step([7, 3])
    engine.step([3, 7])


def test_a_new_context_of_the_length_that_an_old_one_would_have_is_read_anew():
    engine = Engine()
    engine.begin(0, 4)
    engine.step([0])
    engine.begin(0, 5)
    engine.step([0])


def test_rows_grow_beyond_their_room():
    engine = Engine()
    engine.begin(0, 2)
    engine.begin(1, rows.ROOM - 2)
    for _ in range(2 * rows.ROOM + 5):
        engine.step([0, 1])
    assert engine.lens[1] > 2 * rows.ROOM


def test_values_beyond_a_context_are_never_seen_even_where_they_are_not_finite():
    engine = Engine()
    engine.begin(0, 3)
    unused = engine.table[0, 3:].long()
    engine.caches[:, :, unused] = float("nan")
    engine.begin(1, 40)
    for _ in range(3):
        engine.step([0, 1])


def test_too_large_rows_are_left_to_the_gathered_way(monkeypatch):
    engine = Engine()
    engine.begin(0, 3)
    assert engine.step([0])
    monkeypatch.setattr(rows, "MAX_BYTES", 1)
    assert not engine.step([0])
    monkeypatch.undo()
    assert engine.rows.plan(torch.tensor([0]), torch.tensor([engine.lens[0] + 1]))
