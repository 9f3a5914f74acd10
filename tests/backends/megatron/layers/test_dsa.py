"""The indexer of sparse attention: what it chooses in a packed row, and both ways to rotate it.
Plain tensors; no ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from milescli.backends.megatron.layers.attention import pack_row
from milescli.backends.megatron.layers.dsa import LightningIndexer
from milescli.backends.megatron.step.rows import RowShape, make_row
from milescli.models import parse_facts
from tests.backends.megatron.latent_models import MODELS

FACTS = parse_facts(MODELS["sparse"])
LENGTHS = [9, 3, 14, 30, 8]


def _indexer(facts=FACTS) -> LightningIndexer:
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False)
    torch.manual_seed(0)
    made = LightningIndexer(config, facts, tp_group=SimpleNamespace(size=lambda: 1))
    for parameter in made.parameters():
        parameter.copy_(torch.randn_like(parameter))
    return made


def _inputs(lengths: list[int]):
    generator = torch.Generator().manual_seed(1)
    sizes = (FACTS.hidden_size, FACTS.mla.q_lora_rank)
    return [torch.randn(sum(lengths), 1, size, generator=generator) for size in sizes]


def _seen(
    indexer: LightningIndexer, x: torch.Tensor, qr: torch.Tensor, lengths: list[int]
) -> list[torch.Tensor]:
    """Per sequence [length, length] bool: which query looks at which key."""
    ends = np.cumsum([0, *lengths]).tolist()
    row = make_row(list(zip(ends, lengths, strict=False)), shape=RowShape())
    packed = pack_row(row, shape=RowShape(), facts=FACTS, device=torch.device("cpu"))
    chosen = indexer.choose(indexer(x, qr, packed), packed)
    by_length, cell = {}, 0
    for grid in packed.grids:
        masks = chosen.get(
            id(grid),
            torch.ones(grid.shape[2], grid.shape[2], dtype=torch.bool)
            .tril()
            .expand(grid.shape[0], 1, -1, -1),
        )
        for number, length in enumerate(grid.lengths):
            first = int(packed.queries.position[cell + number * grid.shape[1]])
            by_length[ends.index(first)] = masks[number, 0, :length, :length]
        cell += grid.shape[0] * grid.shape[1]
    return [by_length[number] for number in range(len(lengths))]


def test_sequences_of_a_row_choose_as_each_does_alone() -> None:
    indexer, (x, qr) = _indexer(), _inputs(LENGTHS)
    together = _seen(indexer, x, qr, LENGTHS)
    ends = np.cumsum([0, *LENGTHS])
    for number, length in enumerate(LENGTHS):
        mine = slice(ends[number], ends[number + 1])
        (alone,) = _seen(indexer, x[mine], qr[mine], [length])
        assert torch.equal(together[number], alone)
        seen = alone.sum(dim=-1).tolist()
        assert seen == [min(place + 1, FACTS.indexer.topk) for place in range(length)]


def test_pairs_are_halves_whose_weights_lie_in_another_order() -> None:
    halves, (x, qr) = _indexer(), _inputs([20])
    facts = replace(FACTS, indexer=replace(FACTS.indexer, rope_interleaved=True))
    pairs = _indexer(facts)
    turned, width = FACTS.mla.qk_rope_head_dim, FACTS.indexer.head_dim
    order = torch.arange(width)
    order[:turned] = torch.arange(turned).view(2, -1).T.flatten()  # 0 3 1 4 2 5
    heads = (torch.arange(FACTS.indexer.num_heads)[:, None] * width + order).flatten()
    pairs.linear_wq_b.weight.copy_(halves.linear_wq_b.weight[heads])
    for module, name in (("linear_wk", "weight"), ("k_norm", "weight"), ("k_norm", "bias")):
        getattr(getattr(pairs, module), name).copy_(getattr(getattr(halves, module), name)[order])
    expected, chosen, unordered = (
        _seen(each, x, qr, [20])[0] for each in (halves, pairs, _indexer(facts))
    )
    assert torch.equal(expected, chosen)
    assert not torch.equal(expected, unordered)
