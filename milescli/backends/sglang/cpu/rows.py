"""Keys and values of the running requests, one row a request: a decode step on a CPU reads them
where they lie. SGLang's slots are scattered; to gather them in every layer and step took half of a
step. Used by `attention`.

Letters: R rows, B requests, P positions that a row has room for, N longest context, H query heads,
K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROOM = 64
"""Positions by which rows grow."""
MAX_BYTES = 512 * 2**20
"""Of all rows together, which come on top of SGLang's slots; what needs more is gathered as before.
Models of that size are bound by their weights."""


@dataclass(slots=True)
class _Layer:
    """Rows of one layer."""

    keys: torch.Tensor
    """[R, K, P, D]"""
    values: torch.Tensor
    """[R, K, P, D]"""


class ContextRows:
    """Planned once per decode step, used by each layer. What is not known to be in a row is read
    from SGLang's slots."""

    def __init__(self, req_to_token: torch.Tensor, *, bytes_per_token: int) -> None:
        """`req_to_token`: [requests, positions] SGLang's table of slots. `bytes_per_token`: keys
        and values of all layers."""
        self._table = req_to_token
        self._bytes_per_token = bytes_per_token
        self._layers: dict[int, _Layer] = {}
        self._row_of = torch.full((len(req_to_token),), -1)
        """[requests of the table] its row; -1: none."""
        self._len_of = torch.zeros(len(req_to_token), dtype=torch.int64)
        """[requests of the table] tokens of its context that the row holds."""
        self._batch: torch.Tensor | None = None
        self._num_rows = 0
        self._room = 0

    def forget(self, requests_B: torch.Tensor) -> None:
        """Their contexts change by something else than one more token."""
        self._row_of[requests_B] = -1
        self._batch = None

    def plan(self, requests_B: torch.Tensor, lens_B: torch.Tensor) -> bool:
        """Before a decode step; `lens_B` counts the new tokens. False: too much for rows."""
        num_positions = int(lens_B.max())
        if self._batch is None or not self._goes_on(requests_B, lens_B):
            self._replan(requests_B, lens_B)
        else:
            self._source_rows = None
        if num_positions > self._room:
            self._room = -(-num_positions // ROOM) * ROOM + ROOM
        if self._num_rows * self._room * self._bytes_per_token > MAX_BYTES:
            self._layers.clear()
            self.forget(requests_B)
            return False
        self._lens_B, self._num_positions = lens_B, num_positions
        self._len_of[requests_B] = lens_B
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._places: dict[int, torch.Tensor] = {}
        return True

    def _goes_on(self, requests_B: torch.Tensor, lens_B: torch.Tensor) -> bool:
        """The requests of the step before, each one token longer."""
        return torch.equal(requests_B, self._batch) and torch.equal(
            self._len_of[requests_B] + 1, lens_B
        )

    def _replan(self, requests_B: torch.Tensor, lens_B: torch.Tensor) -> None:
        """Requests came or went. A few rows without a request are left where they are; else every
        layer's rows are made anew, in the order of the batch."""
        rows_B = self._row_of[requests_B]
        known_B = (rows_B >= 0) & (self._len_of[requests_B] + 1 == lens_B)
        self._batch = requests_B.clone()
        if bool(known_B.all()) and 4 * len(rows_B) > 3 * self._num_rows:
            self._rows_B, self._source_rows = rows_B, None
            self._in_order = torch.equal(rows_B, torch.arange(self._num_rows))
            return
        self._source_rows = rows_B.masked_fill(~known_B, -1)
        self._num_rows = len(requests_B)
        self._rows_B, self._in_order = torch.arange(self._num_rows), True
        self._row_of.fill_(-1)
        self._row_of[requests_B] = self._rows_B

    def attend(
        self,
        layer_id: int,
        query_BHD: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        slots: tuple[torch.Tensor, torch.Tensor],
        *,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """[B, H, D]. `new`: [B, K, D] keys and values of the new tokens; `slots`: SGLang's caches
        [slots, K, D], which hold them already."""
        layer = self._layer(layer_id, slots)
        (num_rows, num_kv, room, size), num_positions = layer.keys.shape, self._num_positions
        places = self._place(num_kv)
        for kept, fresh in zip((layer.keys, layer.values), new, strict=True):
            kept.view(-1, size).index_copy_(0, places, fresh.reshape(-1, size))
        if not self._in_order:
            rows = query_BHD.new_zeros((num_rows, *query_BHD.shape[1:]))
            query = rows.index_copy_(0, self._rows_B, query_BHD)
        else:
            query = query_BHD
        flat = (num_rows * num_kv, room, size)
        keys, values = (kept.view(flat)[:, :num_positions] for kept in (layer.keys, layer.values))
        query = query.reshape(flat[0], -1, size)
        mask = self._mask(num_kv, window).expand(-1, query.shape[1], -1)
        scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scaling)
        attended = torch.bmm(torch.softmax(scores, -1), values)
        attended = attended.view(num_rows, *query_BHD.shape[1:])
        return attended if self._in_order else attended.index_select(0, self._rows_B)

    def _place(self, num_kv: int) -> torch.Tensor:
        """[B * K] where the new tokens go, in rows laid one after the other."""
        if num_kv not in self._places:
            heads = self._rows_B[:, None] * num_kv + torch.arange(num_kv)
            self._places[num_kv] = (heads * self._room + (self._lens_B[:, None] - 1)).view(-1)
        return self._places[num_kv]

    def _mask(self, num_kv: int, window: int | None) -> torch.Tensor:
        """[R * K, 1, N] additive; a row without a request sees its first position, so that it has
        a softmax. Made once per step."""
        key = (num_kv, window)
        if key not in self._masks:
            last_R1 = torch.zeros((self._num_rows, 1), dtype=torch.int64)
            last_R1[self._rows_B] = self._lens_B[:, None] - 1
            position_N = torch.arange(self._num_positions)
            seen_RN = position_N <= last_R1
            if window is not None and window > -1:
                seen_RN &= position_N >= last_R1 - window
            mask = torch.zeros(seen_RN.shape).masked_fill_(~seen_RN, float("-inf"))
            self._masks[key] = mask.repeat_interleave(num_kv, 0)[:, None]
        return self._masks[key]

    def _layer(self, layer_id: int, slots: tuple[torch.Tensor, torch.Tensor]) -> _Layer:
        """This layer's rows, as the plan of this step wants them."""
        layer = self._layers.get(layer_id)
        if layer is None:
            layer = _Layer(*(self._filled(None, kept) for kept in slots))
            self._layers[layer_id] = layer
        elif self._source_rows is not None or layer.keys.shape[2] != self._room:
            layer.keys = self._filled(layer.keys, slots[0])
            layer.values = self._filled(layer.values, slots[1])
        return layer

    def _filled(self, old: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
        """[R, K, P, D] rows from the old ones, and from the slots where there is none. Zero beyond
        a context: what the mask hides must be finite."""
        rows = slots.new_zeros((self._num_rows, slots.shape[1], self._room, slots.shape[2]))
        if old is not None and self._source_rows is None:
            rows[:, :, : old.shape[2]] = old
            return rows
        source_B = self._source_rows
        if old is None:
            source_B = torch.full_like(self._rows_B, -1)
        kept = (source_B >= 0).nonzero().squeeze(1)
        if len(kept):
            rows[kept, :, : old.shape[2]] = old[source_B[kept]]
        fresh = (source_B < 0).nonzero().squeeze(1)
        if len(fresh):
            lens = self._lens_B[fresh]
            table = self._table[self._batch[fresh], : self._num_positions].long()
            held = torch.arange(self._num_positions) < lens[:, None]
            gathered = slots[table.masked_fill_(~held, 0)].masked_fill_(~held[..., None, None], 0.0)
            rows[self._rows_B[fresh], :, : self._num_positions] = gathered.transpose(1, 2)
        return rows
