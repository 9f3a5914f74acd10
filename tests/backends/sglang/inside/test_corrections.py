"""Two halves of one weight meet, however the buckets are cut."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.backends.sglang.inside.corrections import in_pairs

QUERY, KEY_VALUE = (
    "model.layers.{}.self_attn.q_a_proj.weight",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight",
)
NAMES = [
    name.format(layer)
    for layer in range(3)
    for name in ("model.layers.{}.norm.weight", QUERY, KEY_VALUE)
]


@given(order=st.permutations(NAMES), cuts=st.lists(st.integers(0, len(NAMES)), max_size=4))
def test_every_weight_arrives_once_and_halves_within_one_order(order, cuts):
    numbers = {name: float(index) for index, name in enumerate(NAMES)}
    memory = torch.zeros(1)
    waiting: dict[str, torch.Tensor] = {}
    arrived = []
    edges = [0, *sorted(cuts), len(order)]
    for start, end in itertools.pairwise(edges):

        def bucket(names=tuple(order[start:end])):
            for name in names:  # the sender uses its memory again
                yield name, memory.fill_(numbers[name])

        arrived.append([(name, float(tensor)) for name, tensor in in_pairs(bucket(), waiting)])
    assert waiting == {}
    assert sorted(pair for names in arrived for pair in names) == sorted(numbers.items())
    for names in arrived:
        here = {name for name, _ in names}
        for layer in range(3):
            assert (QUERY.format(layer) in here) == (KEY_VALUE.format(layer) in here)
