"""States of gated delta nets during speculative decoding, on a CPU: each guess continues from the
state of its parent; no state is committed at first, and after verification that of the last
accepted guess is. In plain torch, with SGLang's data structures and calls for a GPU.

Letters: B requests, N nodes of a request's tree (its last token, then the guesses; each after its
parent), H value heads, K and V dims of a key and a value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def install() -> None:
    """Install the pieces, only in engines that speculate."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid

    stock = hybrid.MambaAttnBackendBase._forward_metadata

    def forward_metadata(self, forward_batch):
        """Fill in each node's parent. SGLang's own code leaves that to a kernel, and takes a single
        path of guesses to be a chain, which padded n-grams are not."""
        made = stock(self, forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            tree = forward_batch.spec_info
            made.retrieve_parent_token = parents(
                tree.retrieve_next_token, tree.retrieve_next_sibling
            )
        return made

    hybrid.MambaAttnBackendBase._forward_metadata = forward_metadata
    hybrid.scatter_mamba_states_after_mtp_verify = take_over


def parents(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """Return [B, N] the parent of each node, -1 for node 0. The arguments [B, N] hold each node's
    first child, and the next child of its own parent; -1 if there is none."""
    parents_of = []
    for children, siblings in zip(next_token.tolist(), next_sibling.tolist(), strict=True):
        parent = [-1] * len(children)
        for node, first in enumerate(children):
            child = first
            while child != -1:
                parent[child], child = node, siblings[child]
        parents_of.append(parent)
    return torch.tensor(parents_of)


def take_over(
    caches,
    slots: Tensor,
    last_right: Tensor,
    track_slots: Tensor | None,
    track_steps: Tensor | None,
) -> None:
    """Replace the states [layers, slots, ...] of requests `slots` [B] by those of their nodes
    `last_right` [B]. On a CPU no cached prefix has states to track."""
    assert track_slots is None and track_steps is None, "states of kept prefixes"
    rows, to = torch.arange(len(slots)), slots.long()
    nodes = [(caches.temporal, caches.intermediate_ssm)]
    nodes += zip(caches.conv, caches.intermediate_conv_window, strict=True)
    for states, of_nodes in nodes:
        states[:, to] = of_nodes[:, rows, last_right.long()].to(states.dtype)


def convolve(
    x: Tensor, states: Tensor, weight: Tensor, *, slots: Tensor, parents: Tensor, nodes: Tensor
) -> Tensor:
    """Convolve depth-wise, x [B, dim, N] -> [B, dim, N], without changing `states` [slots, dim,
    width - 1]; the states of each node go to `nodes` [rows, N, dim, width - 1]."""
    made = torch.empty_like(x)
    requests, first = torch.arange(len(x)), states[slots].to(x.dtype)
    for node in range(x.shape[2]):
        before = first if node == 0 else nodes[requests, parents[:, node]].to(x.dtype)
        whole = torch.cat([before, x[:, :, node, None]], dim=2)
        nodes[requests, node] = whole[:, :, 1:].to(nodes.dtype)
        made[:, :, node] = (whole * weight).sum(-1)
    return made


def recur(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    states: Tensor,
    slots: Tensor,
    parents: Tensor,
    nodes: Tensor,
) -> Tensor:
    """Return the outputs [B * N, H, V] of the delta rule, for query and key [B * N, H, K], value [B
    * N, H, V], g and beta [B * N, H], without changing `states` [slots, H, V, K]; the states of
    each node go to `nodes` [rows, N, H, V, K]."""
    shape, requests = parents.shape, torch.arange(len(parents))
    query, key, value, g, beta = (part.unflatten(0, shape) for part in (query, key, value, g, beta))
    made, first = torch.empty_like(value), states[slots].float()
    for node in range(shape[1]):
        before = first if node == 0 else nodes[requests, parents[:, node]].float()
        state, made[:, node] = step(
            before, query[:, node], key[:, node], value[:, node], g[:, node], beta[:, node]
        )
        nodes[requests, node] = state.to(nodes.dtype)
    return made.flatten(0, 1)


def step(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one token of each request; returns (state after it [B, H, V, K], output [B, H,
    V])."""
    state = state * g.exp()[:, :, None, None]
    recalled = torch.einsum("bhvk,bhk->bhv", state, key)
    written = (value - recalled) * beta[..., None]
    state = state + written[..., None] * key[:, :, None]
    return state, torch.einsum("bhvk,bhk->bhv", state, query)
