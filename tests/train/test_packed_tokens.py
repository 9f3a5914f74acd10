"""What an objective may ask of its tokens, on one process; layouts are tested on real trainers in
tests/backends/megatron."""

from __future__ import annotations

import pytest
import torch

from milescli.train.packed_tokens import PackedTokens, Places

# two sequences of 3 and 4 tokens, whose predicted tokens are 1, 2 and 1, 2, 3, then padding
TOKENS = PackedTokens(
    places=Places(
        sequence=torch.tensor([0, 0, 1, 1, 1, 2]),
        offset=torch.tensor([1, 2, 1, 2, 3, 0]),
        lengths=torch.tensor([3, 4]),
    ),
    loss_mask=torch.tensor([False, True, True, False, True, False]),
    loss_weights=torch.ones(6),
    streams={},
)
VALUES = torch.tensor([10.0, 11.0, 20.0, 21.0, 22.0, 99.0])


def test_sums_are_over_trained_tokens() -> None:
    assert TOKENS.sum_by_sequence(VALUES).tolist() == [11.0, 42.0]
    assert TOKENS.sum_by_sequence(TOKENS.loss_mask).tolist() == [1.0, 2.0]
    assert TOKENS.reduce(VALUES, "mean").item() == pytest.approx(53.0 / 3)
    assert TOKENS.reduce(VALUES, "max").item() == 22.0


def test_whole_sequences_are_rows_and_go_back_to_where_they_were() -> None:
    rows = TOKENS.whole_sequences(VALUES)
    assert rows.tolist() == [[0, 10, 11, 0], [0, 20, 21, 22]]
    assert TOKENS.own_part(rows).tolist() == [10, 11, 20, 21, 22, 0]
    mask = TOKENS.whole_sequences(TOKENS.loss_mask)
    assert (rows * mask).tolist() == [[0, 0, 11, 0], [0, 20, 0, 22]]


def test_each_token_gets_the_value_of_its_sequence() -> None:
    assert TOKENS.spread(torch.tensor([1.0, 2.0])).tolist() == [1, 1, 2, 2, 2, 0]
