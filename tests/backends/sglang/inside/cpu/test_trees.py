"""Trees of guesses, against plain words of what they are."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.backends.sglang.inside.cpu import trees

NODES = 6
parents_of_trees = st.tuples(*(st.integers(0, node - 1) for node in range(1, NODES))).map(
    lambda parents: [-1, *parents]
)
TOKENS = st.lists(st.integers(0, 3), min_size=NODES, max_size=NODES)


def _paths(parents: list[int]) -> list[list[int]]:
    """Of each node, from the root."""
    paths = [[0]]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append([*paths[parent], node])
    return paths


def _mask(parents: list[int]) -> torch.Tensor:
    mask = torch.zeros(NODES, NODES, dtype=torch.bool)
    for node, path in enumerate(_paths(parents)):
        mask[node, path] = True
    return mask


def _links(parents: list[int]) -> tuple[torch.Tensor, ...]:
    """What the mask of one request is reconstructed to: positions, rows, children, siblings."""
    made = [torch.empty(1, NODES, dtype=torch.int64) for _ in range(4)]
    trees.reconstruct_indices_from_tree_mask(
        _mask(parents).flatten(), torch.tensor([10]), made[0], *made[1:], 1, NODES
    )
    return tuple(made)


@given(parents_of_trees)
def test_links_go_through_all_children_in_order(parents: list[int]) -> None:
    positions, rows, child, sibling = (each[0].tolist() for each in _links(parents))
    assert rows == list(range(NODES))
    assert positions == [10 + len(path) - 1 for path in _paths(parents)]
    for node in range(NODES):
        children, at = [], child[node]
        while at != -1:
            children.append(at)
            at = sibling[at]
        assert children == [other for other in range(NODES) if parents[other] == node]


@given(parents_of_trees, TOKENS, TOKENS)
def test_a_guess_is_right_where_it_is_what_the_model_chose(
    parents: list[int], guessed: list[int], chosen: list[int]
) -> None:
    _, rows, child, sibling = _links(parents)
    predicts = torch.zeros(NODES, dtype=torch.int32)
    accepted = torch.full((1, NODES), -1, dtype=torch.int32)
    count = torch.empty(1, dtype=torch.int32)
    trees.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=torch.tensor([guessed]),
        retrive_index=rows,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=torch.tensor([chosen]),
    )
    right = [
        path
        for path in _paths(parents)
        if all(guessed[b] == chosen[a] for a, b in itertools.pairwise(path))
    ]
    way = [node for node in accepted[0].tolist() if node != -1]
    assert way in right
    assert int(count) == len(way) - 1
    assert [predicts[node] for node in way] == [chosen[node] for node in way]
    assert not any(guessed[node] == chosen[way[-1]] for node in range(NODES)
                   if parents[node] == way[-1])  # fmt: skip


def test_a_chain_of_a_draft_model_is_a_tree_of_one_way() -> None:
    mask = torch.ones(2 * 4 * 4, dtype=torch.bool)
    positions = torch.empty(8, dtype=torch.int64)
    rows, child, sibling = (torch.full((2, 4), -1) for _ in range(3))
    trees.build_tree_kernel_efficient_cpu(
        torch.tensor([[-1, 0, 1], [-1, 0, 1]]),
        torch.tensor([[0, 1, 2], [0, 1, 2]]),
        torch.tensor([5, 9]),
        mask,
        positions,
        rows,
        child,
        sibling,
        1,
        3,
        4,
        trees.QUERIES_ONLY,
    )
    assert positions.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert torch.equal(mask.view(2, 4, 4)[1], torch.ones(4, 4).tril().bool())
    assert child.tolist() == [[1, 2, 3, -1]] * 2
    assert sibling.tolist() == [[-1] * 4] * 2


def test_slots_are_read_written_and_moved() -> None:
    table = torch.arange(40).view(4, 10)
    requests, starts, ends = torch.tensor([2, 0]), torch.tensor([3, 1]), torch.tensor([5, 4])
    out = torch.zeros(8, dtype=torch.int64)
    trees.assign_extend_cache_locs_cpu(requests, table, starts, ends, out, 10)
    assert out.tolist() == [23, 24, 1, 2, 3, 0, 0, 0]
    trees.assign_req_to_token_pool_cpu(requests, table, starts, ends, torch.arange(70, 75), 10)
    assert table[2, 3:5].tolist() == [70, 71]
    assert table[0, 1:4].tolist() == [72, 73, 74]
    cache = torch.arange(12, dtype=torch.float32).view(6, 2)
    trees.copy_all_layer_kv_cache_cpu(
        torch.tensor([cache.data_ptr()]), torch.tensor([8]), torch.tensor([0, 1, 4]),
        torch.tensor([1, 2, 4]),
    )  # fmt: skip
    assert cache[:3].tolist() == [[2, 3], [4, 5], [4, 5]]


@pytest.mark.parametrize("name", ["verify_tree_greedy_cpu", "fill_bonus_tokens_cpu"])
def test_kernels_go_by_the_names_of_sglang(name: str) -> None:
    assert trees.KERNELS[name] is getattr(trees, name)
