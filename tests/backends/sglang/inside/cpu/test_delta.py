"""The gated delta net's chunks against the recurrence, token by token; and one call after another
against one call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from milescli.backends.sglang.inside.cpu import delta

KEY_HEADS, HEADS, KEY, VALUE, SLOTS = 2, 6, 8, 5, 7


def recurrence(q, k, v, g, beta, state):
    """[tokens, H, ...], state [H, K, V], float64."""
    outputs = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        written = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * written[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs), state


@pytest.mark.parametrize("tokens", [1, 5, delta.CHUNK, delta.CHUNK + 1, 3 * delta.CHUNK - 7])
def test_chunks_say_what_the_recurrence_says(tokens):
    torch.manual_seed(0)
    q, k = torch.randn(tokens, HEADS, KEY), F.normalize(torch.randn(tokens, HEADS, KEY), dim=-1)
    v, g, beta = (
        torch.randn(tokens, HEADS, VALUE),
        -torch.rand(tokens, HEADS),
        torch.rand(tokens, HEADS),
    )
    state = torch.randn(HEADS, KEY, VALUE)
    expected, last = recurrence(*(x.double() for x in (q, k, v, g, beta, state)))
    ended, outputs = delta.scan(*(x.transpose(0, 1)[None] for x in (q, k, v, g, beta)), state[None])
    assert torch.allclose(outputs[0].transpose(0, 1).double(), expected, atol=2e-5)
    assert torch.allclose(ended[0].double(), last, atol=2e-5)


def inputs(tokens: int):
    return {
        "q": torch.randn(1, tokens, KEY_HEADS, KEY),
        "k": torch.randn(1, tokens, KEY_HEADS, KEY),
        "v": torch.randn(1, tokens, HEADS, VALUE),
        "a": torch.randn(tokens, HEADS),
        "b": torch.randn(tokens, HEADS),
    }


def extend(x, gates, pool, slots, starts):
    g, beta = delta.fused_gdn_gating_cpu(*gates[:1], x["a"], x["b"], gates[1])
    settings = {
        "g": g,
        "beta": beta,
        "initial_state": pool,
        "initial_state_indices": slots,
        "cu_seqlens": starts,
    }
    return delta.chunk_gated_delta_rule_cpu(q=x["q"], k=x["k"], v=x["v"], **settings)[0][0]


def test_requests_of_a_batch_go_on_in_pieces_and_token_by_token_as_in_one_piece():
    torch.manual_seed(1)
    gates = (torch.rand(HEADS), torch.randn(HEADS))
    lens = [9, 70]
    whole = [inputs(length) for length in lens]
    alone = []
    for x in whole:
        pool = torch.zeros(SLOTS, HEADS, VALUE, KEY)
        alone.append(extend(x, gates, pool, torch.tensor([3]), torch.tensor([0, x["a"].shape[0]])))
    slots, pool = torch.tensor([5, 2]), torch.zeros(SLOTS, HEADS, VALUE, KEY)

    def part(starts, ends):
        axis = {"q": 1, "k": 1, "v": 1, "a": 0, "b": 0}
        cut = [
            {name: x[name].narrow(axis[name], start, end - start) for name in x}
            for x, start, end in zip(whole, starts, ends, strict=True)
        ]
        return {name: torch.cat([x[name] for x in cut], dim=axis[name]) for name in axis}

    first = extend(part([0, 0], [4, 66]), gates, pool, slots, torch.tensor([0, 4, 70]))
    second = extend(part([4, 66], [8, 69]), gates, pool, slots, torch.tensor([0, 4, 7]))
    x = part([8, 69], [9, 70])
    last = delta.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=gates[0],
        dt_bias=gates[1],
        **x,
        initial_state_source=pool,
        initial_state_indices=slots,
    )[0]
    for row, pieces in enumerate(
        ([first[:4], second[:4], last[:1]], [first[4:], second[4:], last[1:]])
    ):
        assert torch.allclose(torch.cat(pieces), alone[row], atol=1e-5)
    untouched = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
    assert pool[untouched].abs().max() == 0


def test_the_convolution_goes_on_where_it_stopped():
    torch.manual_seed(2)
    dim, width = 6, 4
    weight, bias = torch.randn(dim, width), torch.randn(dim)
    rows = [torch.randn(dim, 7), torch.randn(dim, 5)]
    expected = [
        F.silu(F.conv1d(F.pad(x, (width - 1, 0))[None], weight[:, None], bias, groups=dim)[0])
        for x in rows
    ]
    states, slots = torch.full((SLOTS, dim, width - 1), 9.0), torch.tensor([4, 1])

    def pieces(x: torch.Tensor, goes_on: bool, lens: list[int]) -> list[torch.Tensor]:
        starts = torch.tensor([0, lens[0], sum(lens)])
        settings = {
            "activation": "silu",
            "conv_states": states,
            "cache_indices": slots,
            "query_start_loc": starts,
        }
        resumed = torch.tensor([goes_on, goes_on])
        mixed = delta.causal_conv1d_fn_cpu(
            x, weight, bias, has_initial_state=resumed, seq_lens_cpu=lens, **settings
        )
        return list(mixed.split(lens, dim=1))

    first = pieces(torch.cat([rows[0][:, :2], rows[1][:, :1]], dim=1), False, [2, 1])
    second = pieces(torch.cat([rows[0][:, 2:6], rows[1][:, 1:4]], dim=1), True, [4, 3])
    new = torch.stack([x[:, -1] for x in rows])
    last = delta.causal_conv1d_update_cpu(
        new, states, weight, bias, "silu", conv_state_indices=slots
    )
    for row in range(2):
        whole = torch.cat([first[row], second[row], last[row][:, None]], dim=1)
        assert torch.allclose(whole, expected[row], atol=1e-5)
