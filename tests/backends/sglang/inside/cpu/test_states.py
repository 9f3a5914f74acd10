"""Guesses on trees: each node of a gated delta net says what it says at the end of its own path,
and the state that is taken over is that of the last right one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.backends.sglang.inside.cpu import delta, states, trees

KEY_HEADS, HEADS, KEY, VALUE, SLOTS, WIDTH, DIM = 2, 4, 8, 5, 6, 4, 7


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Two requests' parents, of as many nodes each."""
    size = draw(st.integers(1, 6))
    return [[-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))] for _ in range(2)]


def path_to(parents: list[int], node: int) -> list[int]:
    """From node 0."""
    way = [node]
    while parents[way[0]] >= 0:
        way.insert(0, parents[way[0]])
    return way


@given(forests())
@settings(max_examples=30, deadline=None)
def test_parents_are_those_that_the_links_were_made_of(forest: list[list[int]]) -> None:
    child, sibling = (torch.full((2, len(forest[0])), -1) for _ in range(2))
    for request, parents in enumerate(forest):
        trees._link(parents, child[request], sibling[request])
    assert states.parents(child, sibling).tolist() == forest


@given(forests(), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_a_node_says_what_its_path_says_token_by_token(forest: list[list[int]], last: int) -> None:
    torch.manual_seed(0)
    size, slots, parents = len(forest[0]), torch.tensor([4, 1]), torch.tensor(forest)
    last = min(last, size - 1)
    gates = {"A_log": torch.rand(HEADS), "dt_bias": torch.randn(HEADS)}
    pool = torch.randn(1, SLOTS, HEADS, VALUE, KEY)
    windows, weight = torch.randn(1, SLOTS, DIM, WIDTH - 1), torch.randn(DIM, WIDTH)
    kept = torch.zeros(1, 3, size, HEADS, VALUE, KEY)
    kept_windows = torch.zeros(1, 3, size, DIM, WIDTH - 1)
    x = torch.randn(2, DIM, size)
    given = {
        "q": torch.randn(2, size, KEY_HEADS, KEY),
        "k": torch.randn(2, size, KEY_HEADS, KEY),
        "v": torch.randn(2, size, HEADS, VALUE),
        "a": torch.randn(2, size, HEADS),
        "b": torch.randn(2, size, HEADS),
    }
    rows = {name: value.flatten(0, 1) for name, value in given.items()}
    before, before_windows = pool.clone(), windows.clone()
    said = delta.fused_sigmoid_gating_delta_rule_update_cpu(
        **gates,
        **{name: rows[name][None] for name in "qkv"},
        **{name: rows[name] for name in "ab"},
        initial_state_source=pool[0],
        initial_state_indices=slots,
        intermediate_states_buffer=kept[0],
        retrieve_parent_token=parents,
    )[0].view(2, size, HEADS, VALUE)
    mixed = delta.causal_conv1d_update_cpu(
        x,
        windows[0],
        weight,
        None,
        "silu",
        conv_state_indices=slots,
        intermediate_conv_window=kept_windows[0],
        retrieve_parent_token=parents,
    )
    assert torch.equal(pool, before) and torch.equal(windows, before_windows)

    alone, alone_windows = pool[0].clone(), windows[0].clone()
    for request in range(2):
        slot = slots[request : request + 1]
        for node in path_to(forest[request], last):
            one = {name: value[request, node][None] for name, value in given.items()}
            output = delta.fused_sigmoid_gating_delta_rule_update_cpu(
                **gates,
                **{name: one[name][None] for name in "qkv"},
                **{name: one[name] for name in "ab"},
                initial_state_source=alone,
                initial_state_indices=slot,
            )[0, 0]
            moved = delta.causal_conv1d_update_cpu(
                x[request, :, node][None], alone_windows, weight, None, "silu",
                conv_state_indices=slot,
            )[0]  # fmt: skip
        assert said[request, last] == pytest.approx(output, abs=1e-6)
        assert mixed[request, :, last] == pytest.approx(moved, abs=1e-6)

    caches = SimpleNamespace(
        temporal=pool,
        intermediate_ssm=kept,
        conv=[windows],
        intermediate_conv_window=[kept_windows],
    )
    states.take_over(caches, slots, torch.tensor([last, last]), None, None)
    assert torch.allclose(pool[0], alone, atol=1e-6)
    assert torch.allclose(windows[0], alone_windows, atol=1e-6)
