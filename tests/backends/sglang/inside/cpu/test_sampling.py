"""The seeded sampler, by itself."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.backends.sglang.inside.cpu.sampling import (
    likeliest,
    sample,
    sample_from_logprobs,
    uniform,
)


def murmur3_32(words: list[int]) -> int:
    """The published algorithm over 4-byte blocks, seed 0, on Python integers."""
    state = 0
    for word in words:
        word = word * 0xCC9E2D51 % 2**32
        word = (word << 15 | word >> 17) % 2**32
        word = word * 0x1B873593 % 2**32
        state ^= word
        state = (state << 13 | state >> 19) % 2**32
        state = (state * 5 + 0xE6546B64) % 2**32
    state ^= 4 * len(words)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20))
def test_the_hash_is_murmur3(seed, position):
    got = float(uniform(torch.tensor([seed]), torch.tensor([position])))
    assert got == (murmur3_32([seed % 2**32, seed >> 32, position]) + 0.5) / 2**32


def test_tokens_follow_the_weights():
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2])
    number = 20_000
    drawn = sample(
        weights.expand(number, 4), torch.arange(number) * 7919, torch.arange(number) % 50
    )
    shares = torch.bincount(drawn, minlength=4) / number
    assert shares[1] == 0
    assert torch.allclose(shares, weights, atol=0.015)


@given(st.integers(2, 40), st.integers(0, 2**40))
def test_a_token_does_not_depend_on_the_rest_of_the_batch(batch, seed):
    weights = torch.rand(batch, 50, generator=torch.Generator().manual_seed(seed % 1000))
    seeds, positions = torch.arange(batch) + seed, torch.arange(batch)
    together = sample(weights, seeds, positions)
    alone = torch.cat(
        [
            sample(weights[row : row + 1], seeds[row : row + 1], positions[row : row + 1])
            for row in range(batch)
        ]
    )
    assert torch.equal(together, alone)


def test_log_probs_that_are_cut_and_not_normalised_give_the_same_tokens_as_their_weights():
    weights = torch.rand(64, 30)
    weights[:, ::3] = 0
    seeds, positions = torch.arange(64), torch.full((64,), 9)
    assert torch.equal(
        sample_from_logprobs(weights.log() + 5, seeds, positions)[:, 0],
        sample(weights, seeds, positions),
    )


@given(st.integers(0, 1000))
def test_bounds_of_others_do_not_change_what_is_drawn(seed):
    probs = torch.rand(3, 40, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    top_ks, top_ps = torch.tensor([1 << 30, 1, 7]), torch.tensor([1.0, 1.0, 0.6])
    few = likeliest(probs, top_ks, top_ps)
    assert torch.equal(few[0], probs[0])
    assert few[1].nonzero().tolist() == [[int(probs[1].argmax())]]
    kept = few[2].nonzero().squeeze(1)
    assert 1 <= len(kept) <= 7
    assert set(kept.tolist()) == set(probs[2].topk(len(kept)).indices.tolist())
    assert float(few[2].sum() - few[2][kept].min()) <= 0.6
