"""Packing: every answer once, caps kept, weights that sum to one, and tokens where they belong."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.types import Group, Prompt, RoutedExperts, Sample, StopReason
from milescli.train import packing
from milescli.train.base import LossKind, TrainBatch


def _sample(
    prompt: list[int], response: list[int], mask: list[bool], routed: RoutedExperts | None = None
) -> Sample:
    return Sample(
        sample_index=0,
        seed=0,
        prompt_ids=prompt,
        response_ids=response,
        logprobs=array("d", [-0.5 - index for index in range(len(response))]),
        loss_mask=mask,
        text="",
        stop_reason=StopReason.STOP,
        version_spans=[],
        reward=0.0,
        routed_experts=routed,
    )


def _group(samples: list[Sample]) -> Group:
    return Group(prompt=Prompt(index=0, token_ids=samples[0].prompt_ids, text=""), samples=samples)


def _pack(
    samples: list[Sample],
    *,
    dp: int = 1,
    cap: int = 64,
    updates: int = 1,
    aggregation: str = "token_mean",
) -> TrainBatch:
    return packing.pack_policy(
        [_group(samples)],
        [[float(index + 1) for index in range(len(samples))]],
        dp=dp,
        max_tokens_per_microbatch=cap,
        updates=updates,
        aggregation=aggregation,
        temperature=1.0,
    )


def test_the_example_of_the_contract() -> None:
    batch = _pack([_sample([10, 11], [12, 13], [True, True])])
    assert batch.input_ids.tolist() == [10, 11, 12]
    assert batch.target_ids.tolist() == [11, 12, 13]
    assert batch.loss_mask.tolist() == [False, True, True]
    assert batch.engine_logprobs.tolist() == [0.0, -0.5, -1.5]
    assert batch.advantages.tolist() == [0.0, 1.0, 1.0]
    assert batch.loss_weights.tolist() == [0.0, 0.5, 0.5]
    assert batch.cu_seqlens == [0, 3]


def test_tokens_that_are_not_trained_on_carry_nothing() -> None:
    batch = _pack([_sample([1], [2, 3, 4], [True, False, True])])
    assert batch.loss_mask.tolist() == [True, False, True]
    assert batch.engine_logprobs.tolist() == [-0.5, 0.0, -2.5]
    assert batch.loss_weights.tolist() == [0.5, 0.0, 0.5]


def test_sequence_mean_gives_each_answer_an_equal_share() -> None:
    batch = _pack(
        [_sample([1], [2], [True]), _sample([1], [2, 3, 4, 5], [True] * 4)],
        aggregation="sequence_mean",
    )
    assert batch.loss_weights.tolist() == [0.5, 0.125, 0.125, 0.125, 0.125]


samples = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.booleans(), min_size=1, max_size=30)),
    min_size=1,
    max_size=24,
).map(lambda rows: [_sample([1] * prompt, [2] * len(mask), mask) for prompt, mask in rows])


@settings(max_examples=80, deadline=None)
@given(
    samples,
    st.integers(1, 4),
    st.integers(8, 80),
    st.integers(1, 4),
    st.sampled_from(["token_mean", "sequence_mean"]),
)
def test_every_sequence_is_there_once_and_the_contract_holds(
    rows: list[Sample], dp: int, cap: int, updates: int, aggregation: str
) -> None:
    batch = _pack(rows, dp=dp, cap=cap, updates=updates, aggregation=aggregation)
    lengths = np.diff(batch.cu_seqlens)
    flat = [
        index
        for update in batch.updates
        for rank in update
        for microbatch in rank
        for index in microbatch
    ]
    assert sorted(flat) == list(range(len(rows)))
    assert len(batch.updates) == min(updates, len(rows))
    for update in batch.updates:
        assert len(update) == dp
        assert len({len(rank) for rank in update}) == 1, "equally many microbatches"
        for microbatch in (each for rank in update for each in rank):
            assert len(microbatch) <= 1 or sum(lengths[index] for index in microbatch) <= cap
        members = [index for rank in update for microbatch in rank for index in microbatch]
        total = sum(
            float(batch.loss_weights[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]].sum())
            for i in members
        )
        trained = any(any(rows[index].loss_mask) for index in members)
        assert total == pytest.approx(1.0 if trained else 0.0, abs=1e-5)
    assert not batch.loss_weights[~batch.loss_mask].any()


@settings(max_examples=30, deadline=None)
@given(samples, st.integers(1, 3))
def test_packing_is_deterministic(rows: list[Sample], dp: int) -> None:
    one, other = _pack(rows, dp=dp), _pack(rows, dp=dp)
    assert one.updates == other.updates
    assert torch.equal(one.loss_weights, other.loss_weights)


def test_ranks_get_like_amounts_of_tokens() -> None:
    rows = [_sample([1], [2] * length, [True] * length) for length in range(1, 41)]
    batch = _pack(rows, dp=4, cap=10_000)
    lengths = np.diff(batch.cu_seqlens)
    loads = [
        sum(int(lengths[index]) for microbatch in rank for index in microbatch)
        for rank in batch.updates[0]
    ]
    assert max(loads) - min(loads) <= 4


def test_demonstrations_train_on_the_whole_answer() -> None:
    batch = packing.pack_supervised(
        [([1, 2], [3, 4]), ([5], [6])], dp=1, max_tokens_per_microbatch=64
    )
    assert batch.kind is LossKind.SUPERVISED
    assert batch.input_ids.tolist() == [1, 2, 3, 5]
    assert batch.target_ids.tolist() == [2, 3, 4, 6]
    assert batch.loss_mask.tolist() == [False, True, True, True]
    assert batch.loss_weights.sum().item() == pytest.approx(1.0)


def test_expert_choices_lie_beside_their_tokens() -> None:
    def routed(first: int) -> RoutedExperts:
        return RoutedExperts(
            indices=np.arange(first, first + 12, dtype=np.int32).tobytes(),
            num_tokens=3,
            num_layers=2,
            topk=2,
        )

    rows = [
        _sample([1, 2], [3, 4], [True, True], routed(0)),
        _sample([1, 2], [3, 4], [True, True], routed(100)),
    ]
    batch = packing.pack_policy(
        [_group(rows)],
        [[0.0, 0.0]],
        dp=1,
        max_tokens_per_microbatch=64,
        updates=1,
        aggregation="token_mean",
        temperature=1.0,
        routing_replay=True,
    )
    assert batch.routed_experts.shape == (6, 2, 2)
    assert batch.routed_experts[3].tolist() == [[100, 101], [102, 103]]
