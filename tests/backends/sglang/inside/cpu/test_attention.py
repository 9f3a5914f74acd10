"""Batched attention against a loop over requests, each by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from milescli.backends.sglang.inside.cpu.attention import Batched

HEADS, KV_HEADS, SIZE, SLOTS = 4, 2, 8, 200


class Stock:
    """Where the stock backend stands; its plan does nothing here."""

    def init_forward_metadata(self, forward_batch) -> None:
        pass


class Backend(Batched, Stock):
    pass


def batch(prefix: list[int], new: list[int], *, decode: bool, has_kernel: bool = False):
    """Requests with so many cached and new tokens, whose cache slots are scattered."""
    lens = [cached + fresh for cached, fresh in zip(prefix, new, strict=True)]
    shuffled = torch.randperm(SLOTS)
    table = torch.zeros(len(lens), max(lens) + 5, dtype=torch.int32)
    for row, length in enumerate(lens):
        table[row, :length], shuffled = shuffled[:length], shuffled[length:]
    forward = SimpleNamespace(
        encoder_lens=None,
        batch_size=len(lens),
        seq_lens=torch.tensor(lens),
        req_pool_indices=torch.arange(len(lens)),
        extend_prefix_lens=torch.tensor(prefix),
        extend_seq_lens=torch.tensor(new),
        forward_mode=SimpleNamespace(is_decode=lambda: decode, is_target_verify=lambda: False),
    )
    backend = Backend()
    backend._has_kernel = has_kernel
    backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
    backend.init_forward_metadata(forward)
    return backend, forward, table


def expected(query, keys, values, table, prefix, new, window) -> torch.Tensor:
    parts, start = [], 0
    for row, (cached, fresh) in enumerate(zip(prefix, new, strict=True)):
        slots = table[row, : cached + fresh].long()
        own_query = query[start : start + fresh].transpose(0, 1)
        key = keys[slots].transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0)
        value = values[slots].transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0)
        at, of = torch.arange(cached, cached + fresh)[:, None], torch.arange(cached + fresh)[None]
        seen = (of <= at) & (of >= at - window if window is not None else True)
        parts.append(
            F.scaled_dot_product_attention(own_query, key, value, attn_mask=seen).transpose(0, 1)
        )
        start += fresh
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("prefix", "new"), [([4, 0, 17, 9], [1, 1, 1, 1]), ([0, 5, 12], [7, 1, 20]), ([3], [6])]
)
def test_every_request_attends_as_if_it_were_alone(prefix, new, window):
    torch.manual_seed(0)
    decode = set(new) == {1}
    backend, _, table = batch(prefix, new, decode=decode)
    query = torch.randn(sum(new), HEADS, SIZE)
    keys, values = torch.randn(SLOTS, KV_HEADS, SIZE), torch.randn(SLOTS, KV_HEADS, SIZE)
    output = torch.empty_like(query)
    run = backend._run_sdpa_forward_decode if decode else backend._run_sdpa_forward_extend
    causal = {} if decode else {"causal": True}
    run(query, output, keys, values, scaling=SIZE**-0.5, sliding_window_size=window, **causal)
    assert torch.allclose(
        output, expected(query, keys, values, table, prefix, new, window), atol=1e-5
    )


def test_an_encoder_decoder_batch_is_left_to_the_stock_loop():
    backend, forward, _ = batch([2], [1], decode=True)
    forward.encoder_lens = torch.tensor([3])
    backend.init_forward_metadata(forward)
    assert backend._slots is None


@pytest.mark.parametrize(("prefix", "new"), [([4, 0, 17], [1, 1, 1]), ([0, 5], [7, 9])])
@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_takes_part_in_the_softmax_and_has_no_value(prefix, new, window):
    torch.manual_seed(1)
    decode = set(new) == {1}
    backend, _, table = batch(prefix, new, decode=decode)
    query, sinks = torch.randn(sum(new), HEADS, SIZE), torch.randn(HEADS)
    keys, values = torch.randn(SLOTS, KV_HEADS, SIZE), torch.randn(SLOTS, KV_HEADS, SIZE)
    output = torch.empty_like(query)
    backend._sinks = sinks
    run = backend._run_sdpa_forward_decode if decode else backend._run_sdpa_forward_extend
    run(
        query,
        output,
        keys,
        values,
        scaling=0.3,
        sliding_window_size=window,
        **({} if decode else {"causal": True}),
    )
    start = 0
    for row, (cached, fresh) in enumerate(zip(prefix, new, strict=True)):
        slots = table[row, : cached + fresh].long()
        key, value = (
            kept[slots].repeat_interleave(HEADS // KV_HEADS, 1) for kept in (keys, values)
        )
        logits = torch.einsum("qhd,nhd->hqn", query[start : start + fresh], key) * 0.3
        at, of = torch.arange(cached, cached + fresh)[:, None], torch.arange(cached + fresh)[None]
        seen = (of <= at) & (of >= at - window if window is not None else True)
        logits = logits.masked_fill(~seen, float("-inf"))
        with_sink = torch.cat([logits, sinks.view(-1, 1, 1).expand(-1, fresh, 1)], dim=-1)
        expected_rows = torch.einsum("hqn,nhd->qhd", with_sink.softmax(-1)[..., :-1], value)
        assert torch.allclose(output[start : start + fresh], expected_rows, atol=1e-5)
        start += fresh


@pytest.mark.parametrize(("prefix", "new"), [([4, 0, 17], [1, 1, 1]), ([0, 5], [7, 9])])
def test_a_value_may_be_the_first_part_of_its_key(prefix, new):
    torch.manual_seed(2)
    decode = set(new) == {1}
    backend, _, table = batch(prefix, new, decode=decode)
    query, latent = torch.randn(sum(new), HEADS, SIZE), torch.randn(SLOTS, 1, SIZE)
    output = torch.empty(sum(new), HEADS, SIZE - 3)
    run = backend._run_sdpa_forward_decode if decode else backend._run_sdpa_forward_extend
    run(
        query,
        output,
        latent,
        latent[..., : SIZE - 3],
        scaling=SIZE**-0.5,
        **({} if decode else {"causal": True}),
    )
    both = latent.expand(-1, KV_HEADS, -1)
    whole = expected(query, both, both, table, prefix, new, None)
    assert torch.allclose(output, whole[..., : SIZE - 3], atol=1e-5)


@pytest.mark.parametrize("window", [None, -1, 3])
def test_a_step_over_a_plain_cache_is_one_call(window: int | None) -> None:
    torch.manual_seed(0)
    prefix, new = [4, 0, 17, 9, 40], [1] * 5
    backend, forward, table = batch(prefix, new, decode=True, has_kernel=True)
    assert backend._slots is None, "nothing is gathered"
    keys, values = torch.randn(SLOTS, KV_HEADS, SIZE), torch.randn(SLOTS, KV_HEADS, SIZE)
    query = torch.randn(len(new), HEADS, SIZE)
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        qk_head_dim=SIZE,
        v_head_dim=SIZE,
        scaling=SIZE**-0.5,
        sliding_window_size=window,
        is_cross_attention=False,
    )
    stored = []
    backend._store = lambda *arguments: stored.append(arguments)
    backend.token_to_kv_pool = SimpleNamespace(get_kv_buffer=lambda layer_id: (keys, values))
    output = backend.forward_decode(query.flatten(1), "k", "v", layer, forward)
    assert stored == [(layer, forward, "k", "v")]
    seen = None if window == -1 else window
    wanted = expected(query, keys, values, table, prefix, new, seen)
    assert torch.allclose(output, wanted.flatten(1), atol=1e-5)


PARENTS = [-1, 0, 0, 1, 2]
"""Of guesses: two ways on from the first, each with one more behind it."""


def test_a_guess_sees_the_context_and_its_own_way_alone():
    torch.manual_seed(4)
    prefix, number = [3, 9], len(PARENTS)
    backend, forward, table = batch(prefix, [number] * 2, decode=False)
    tree = torch.eye(number, dtype=torch.bool)
    for node, parent in enumerate(PARENTS[1:], start=1):
        tree[node] |= tree[parent]
    forward.seq_lens, forward.extend_prefix_lens = torch.tensor(prefix), None
    forward.forward_mode.is_target_verify = lambda: True
    forward.spec_info = SimpleNamespace(
        draft_token_num=number, tree_topk=-1, custom_mask=tree.repeat(2, 1, 1).flatten()
    )
    backend.init_forward_metadata(forward)
    query = torch.randn(2 * number, HEADS, SIZE)
    keys, values = torch.randn(SLOTS, KV_HEADS, SIZE), torch.randn(SLOTS, KV_HEADS, SIZE)
    output = torch.empty_like(query)
    backend._run_sdpa_forward_extend(
        query, output, keys, values, scaling=SIZE**-0.5, sliding_window_size=None, causal=True
    )
    for row, cached in enumerate(prefix):
        for node in range(number):
            way = [*range(cached), *(cached + each for each in tree[node].nonzero()[:, 0].tolist())]
            own, place = table[row, way][None], row * number + node
            alone = expected(query[place][None], keys, values, own, [len(way) - 1], [1], None)
            assert torch.allclose(output[place], alone[0], atol=1e-5)


def test_a_pass_of_a_draft_model_sees_what_it_has_guessed_before():
    torch.manual_seed(5)
    backend, forward, table = batch([4, 9], [1, 1], decode=True)
    table[0, 5:7], table[1, 10:12] = torch.tensor([13, 14]), torch.tensor([11, 12])
    backend.num_guessed = 2
    backend.init_forward_metadata(forward)
    query = torch.randn(2, HEADS, SIZE)
    keys, values = torch.randn(SLOTS, KV_HEADS, SIZE), torch.randn(SLOTS, KV_HEADS, SIZE)
    output = torch.empty_like(query)
    backend._run_sdpa_forward_decode(
        query, output, keys, values, scaling=SIZE**-0.5, sliding_window_size=None
    )
    assert torch.allclose(
        output, expected(query, keys, values, table, [6, 11], [1, 1], None), atol=1e-5
    )
