"""SGLang's kernels for speculation, in plain torch, for a CPU: positions in the cache, trees of
guessed tokens, and which guesses the model itself would have chosen. The stand-in for `sgl_kernel`
exports them under SGLang's names, with SGLang's arguments. Knows nothing of sampling.

A request's guesses are the nodes of a tree: node 0 is its last sampled token, and a path from there
is one possible continuation. Letters: B requests, N nodes, K most nodes of a path.
"""

from __future__ import annotations

import ctypes

import torch

QUERIES_ONLY = 1
"""SGLang's mode of tree masks [B * N * N], which it uses on a CPU."""


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    num_nodes: int,
    mask_mode: int,
) -> None:
    """Build the tree of a draft model's guesses. `selected_index` [B, N - 1] says which guesses
    were kept, by level; `parent_list` [B, ...] those from which `topk` guesses each continue, the
    first of them from node 0. Writes the next five arguments."""
    assert int(mask_mode) == QUERIES_ONLY, f"a tree mask of mode {mask_mode}"
    mask_BNN = tree_mask.view(-1, num_nodes, num_nodes)
    _number(retrieve_index)
    parents_of = parent_list.reshape(len(seq_lens), -1).tolist()
    for request, selected in enumerate(selected_index.tolist()):
        node_of = {index: node for node, index in enumerate(selected, start=1)}
        parents = [-1] + [
            0 if index < topk else node_of[parents_of[request][index // topk]] for index in selected
        ]
        seen = _ancestors(parents)
        mask_BNN[request] = seen
        positions.view(-1, num_nodes)[request] = seq_lens[request] + seen.sum(-1) - 1
        _link(parents, retrieve_next_token[request], retrieve_next_sibling[request])


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    num_requests: int,
    num_nodes: int,
) -> None:
    """Write everything that follows from an existing `tree_mask` [B * N * N] of guessed n-grams."""
    mask_BNN = tree_mask.view(num_requests, num_nodes, num_nodes)
    _number(retrieve_index)
    positions.view(num_requests, num_nodes).copy_(seq_lens[:, None] + mask_BNN.sum(-1) - 1)
    above_BNN = torch.tril(mask_BNN, diagonal=-1)
    nearest_BN = (above_BNN * torch.arange(num_nodes)).argmax(-1)
    parents_BN = nearest_BN.masked_fill(~above_BNN.any(-1), -1).tolist()
    for request, parents in enumerate(parents_BN):
        _link(parents, retrieve_next_token[request], retrieve_next_sibling[request])


def _number(retrieve_index: torch.Tensor) -> None:
    """Write [B, N] each node's row among those of all requests."""
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))


def _ancestors(parents: list[int]) -> torch.Tensor:
    """Return [N, N] bool: the node itself and its ancestors. A parent comes before its children."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def _link(parents: list[int], next_token: torch.Tensor, next_sibling: torch.Tensor) -> None:
    """Write each node's first child, and its parent's next child, [N] each; -1: none."""
    children, siblings = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        siblings[node], children[parents[node]] = children[parents[node]], node
    next_token.copy_(torch.tensor(children))
    next_sibling.copy_(torch.tensor(siblings))


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Descend each tree while a guess equals the model's choice. `candidates` [B, N] are guessed
    tokens; `target_predict` [B, N] are the model's choices after each. Writes `predicts` [B * N],
    the choices on the path; `accept_index` [B, K], the rows of the path, then -1;
    `accept_token_num` [B], the number of right guesses."""
    rows = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        target_predict.tolist(),
        strict=True,
    )
    longest = accept_index.shape[1]
    for request, (guessed, row_of, child, sibling, chosen) in enumerate(rows):
        way = [0]
        while len(way) < longest:
            node = child[way[-1]]
            while node != -1 and guessed[node] != chosen[way[-1]]:
                node = sibling[node]
            if node == -1:
                break
            way.append(node)
        places = [row_of[node] for node in way]
        predicts[places] = torch.tensor([chosen[node] for node in way], dtype=predicts.dtype)
        accept_index[request, : len(way)] = torch.tensor(places, dtype=accept_index.dtype)
        accept_token_num[request] = len(way) - 1


def assign_extend_cache_locs_cpu(
    requests: torch.Tensor,
    slots_of: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    row_size: int,
) -> None:
    """Write to `out` the cache slots of positions [start, end) of each request, one request after
    the other."""
    spans = _spans(slots_of, requests, starts, ends)
    slots = torch.cat(spans)
    out[: len(slots)] = slots


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    slots_of: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    row_size: int,
) -> None:
    """Assign `slots` to positions [start, end) of each request; the inverse of
    `assign_extend_cache_locs_cpu`."""
    first = 0
    for span in _spans(slots_of, requests, starts, ends):
        span.copy_(slots[first : first + len(span)])
        first += len(span)


def _spans(
    slots_of: torch.Tensor, requests: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> list[torch.Tensor]:
    """Return views of a table [pool, positions] of cache slots."""
    bounds = zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return [slots_of[request, start:end] for request, start, end in bounds]


def assign_draft_cache_locs_contiguous_cpu(
    requests: torch.Tensor,
    slots_of: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    row_size: int,
    topk: int,
    num_steps: int,
) -> None:
    """Write to `out` [B * topk * num_steps] the slots after each request's context."""
    columns = seq_lens[:, None].long() + torch.arange(topk * num_steps)
    out.copy_(slots_of[requests[:, None].long(), columns].reshape(-1))


def fill_bonus_tokens_cpu(
    tokens: torch.Tensor, num_accepted: torch.Tensor, out: torch.Tensor, stride: int
) -> None:
    """Write to `out` [B] the last of each request's `num_accepted` among its `stride` tokens."""
    rows = torch.arange(len(num_accepted)) * stride + num_accepted.long() - 1
    out.copy_(tokens.reshape(-1)[rows])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
) -> None:
    """Write to the front of `out` the slots of the accepted rows."""
    rows = accept_index.reshape(-1)
    rows = rows[rows >= 0].long()
    out[: len(rows)] = slots[rows]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, row_bytes: torch.Tensor, to: torch.Tensor, source: torch.Tensor
) -> None:
    """Move rows of all caches, given by their addresses alone, from slots `source` to slots `to`.
    Reads all rows of a cache before it writes one."""
    moved = [(a, b) for a, b in zip(to.tolist(), source.tolist(), strict=True) if a != b]
    for address, size in zip(data_ptrs.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + b * size, size) for _, b in moved]
        for (a, _), row in zip(moved, rows, strict=True):
            ctypes.memmove(address + a * size, row, size)


KERNELS = {
    name: kernel for name, kernel in globals().items() if name.endswith("_cpu") and callable(kernel)
}
"""Kernels by SGLang's names."""
