"""Packing: every sequence once, groups and units whole, weights that sum to one, tokens where they
belong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.types import RoutedExperts
from milescli.data.chat_masks import demonstration_trajectory
from milescli.recipe.schema import Recipe
from milescli.train.base import TrainBatch, TrainSequence
from milescli.train.objectives import load_objective
from milescli.train.packing import pack
from milescli.train.streams import Stream
from tests.samples import make_group, make_sample, make_trajectory


def _sequence(
    length: int, *, group: int = 0, unit: int | None = None, mask: list[bool] | None = None
) -> TrainSequence:
    """Tokens 0, 1, 2, ...; all but the first trained on, unless told otherwise."""
    loss_mask = np.array(mask if mask is not None else [False] + [True] * (length - 1))
    return TrainSequence(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=loss_mask,
        streams={Stream.ADVANTAGE: np.full(length, group + 1, np.float32)},
        token_weight=1.0,
        share=float(loss_mask.sum()),
        group=group,
        unit=unit,
    )


def _unit(sequences: list[TrainSequence], number: int) -> object:
    unit = sequences[number].unit
    return ("alone", number) if unit is None else unit


def _pack(sequences: list[TrainSequence], **options: int) -> TrainBatch:
    return pack(
        sequences, objective="policy", **{"dp": 1, "max_tokens_per_microbatch": 64, **options}
    )


def test_the_example_of_the_contract() -> None:
    trajectory = make_trajectory([10, 11], [12, 13], logprobs=[-0.5, -1.5])
    group = make_group([make_sample(trajectory, reward=1.0), make_sample(trajectory, reward=0.0)])
    sequences = load_objective("policy", Recipe()).sequences([group])
    (shard,) = _pack(sequences[:1]).shards
    assert shard.token_ids.tolist() == [10, 11, 12, 13]
    assert shard.loss_mask.tolist() == [False, False, True, True]
    assert shard.streams[Stream.ENGINE].tolist() == [0.0, 0.0, -0.5, -1.5]
    assert shard.loss_weights.tolist() == [0.5]
    assert shard.cu_seqlens.tolist() == [0, 4]
    assert shard.updates == [[[0]]]


@st.composite
def batches(draw: st.DrawFn) -> list[TrainSequence]:
    """Groups of uneven size; some sequences are pairs, some have nothing to train on."""
    sequences: list[TrainSequence] = []
    for group in range(draw(st.integers(1, 6))):
        for _ in range(draw(st.integers(1, 5))):
            masks = draw(st.lists(st.lists(st.booleans(), max_size=25), min_size=1, max_size=2))
            unit = len(sequences) if len(masks) > 1 else None
            for mask in masks:
                whole = [False, *mask]
                sequences.append(_sequence(len(whole), group=group, unit=unit, mask=whole))
    return sequences


@settings(max_examples=120, deadline=None)
@given(batches(), st.integers(1, 4), st.integers(8, 80), st.integers(1, 4))
def test_every_sequence_is_there_once_and_the_contract_holds(
    sequences: list[TrainSequence], dp: int, cap: int, updates: int
) -> None:
    batch = _pack(sequences, dp=dp, max_tokens_per_microbatch=cap, updates=updates)
    num_groups = len({sequence.group for sequence in sequences})
    assert batch.num_sequences == len(sequences) and len(batch.shards) == dp
    numbers = np.concatenate([shard.sequence_ids for shard in batch.shards])
    assert sorted(numbers.tolist()) == list(range(len(sequences)))
    assert {len(shard.updates) for shard in batch.shards} == {min(updates, num_groups)}
    for index in range(min(updates, num_groups)):
        per_rank = [shard.updates[index] for shard in batch.shards]
        assert len({len(microbatches) for microbatches in per_rank}) == 1, "equally many"
        total, members = 0.0, []
        for shard, microbatches in zip(batch.shards, per_rank, strict=True):
            for microbatch in microbatches:
                own = [int(shard.sequence_ids[place]) for place in microbatch]
                members += own
                units = {_unit(sequences, number) for number in own}
                positions = sum(len(sequences[number].token_ids) - 1 for number in own)
                assert len(units) <= 1 or positions <= cap
                total += sum(
                    float(shard.loss_weights[place]) * sequences[number].loss_mask.sum()
                    for place, number in zip(microbatch, own, strict=True)
                )
        is_trained = any(sequences[number].loss_mask.any() for number in members)
        assert total == pytest.approx(1.0 if is_trained else 0.0, abs=1e-5)
        groups = {sequences[number].group for number in members}
        whole = [n for n, sequence in enumerate(sequences) if sequence.group in groups]
        assert sorted(members) == whole, "an update splits no group"


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 3))
def test_tokens_lie_in_the_order_of_their_sequence_and_units_stay_together(
    sequences: list[TrainSequence], dp: int
) -> None:
    batch = _pack(sequences, dp=dp, max_tokens_per_microbatch=40)
    places: dict[int, set[tuple[int, int]]] = {}
    for shard in batch.shards:
        for number, start, end in zip(
            shard.sequence_ids, shard.cu_seqlens, shard.cu_seqlens[1:], strict=False
        ):
            sequence = sequences[number]
            assert shard.token_ids[start:end].tolist() == sequence.token_ids.tolist()
            assert shard.loss_mask[start:end].tolist() == sequence.loss_mask.tolist()
        for index, microbatch in enumerate(shard.updates[0]):
            for place in microbatch:
                unit = sequences[shard.sequence_ids[place]].unit
                if unit is not None:
                    places.setdefault(unit, set()).add((shard.dp_rank, index))
    assert all(len(where) == 1 for where in places.values())


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(8, 80))
def test_sequences_of_a_group_stay_together_where_they_share_their_prompt(
    sequences: list[TrainSequence], cap: int
) -> None:
    (shard,) = _pack(sequences, max_tokens_per_microbatch=cap, shares_prompts=True).shards
    where: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    for index, microbatch in enumerate(shard.updates[0]):
        numbers = [int(shard.sequence_ids[place]) for place in microbatch]
        units = {_unit(sequences, number) for number in numbers}
        positions = sum(len(sequences[number].token_ids) - 1 for number in numbers)
        assert len(units) <= 1 or positions <= cap
        for number in numbers:
            if sequences[number].unit is None:
                group = sequences[number].group
                where.setdefault(group, set()).add(index)
                sizes[group] = sizes.get(group, 0) + len(sequences[number].token_ids) - 1
    assert sorted(shard.sequence_ids.tolist()) == list(range(len(sequences)))
    assert all(len(places) == 1 for group, places in where.items() if sizes[group] <= cap)


def test_packing_is_deterministic() -> None:
    sequences = [_sequence(3 + 7 * index % 11, group=index // 3) for index in range(20)]
    one, other = (_pack(sequences, dp=3, updates=2) for _ in range(2))
    for first, second in zip(one.shards, other.shards, strict=True):
        assert first.updates == second.updates
        assert first.loss_weights.tobytes() == second.loss_weights.tobytes()


def test_a_rank_without_a_sequence_gets_an_empty_microbatch() -> None:
    _, empty = _pack([_sequence(5)], dp=2).shards
    assert empty.updates == [[[]]] and empty.token_ids.shape == (0,)


def test_demonstrations_train_on_the_whole_response() -> None:
    demonstrations = [demonstration_trajectory([1, 2], [3, 4]), demonstration_trajectory([5], [6])]
    sequences = load_objective("supervised", Recipe()).sequences(demonstrations)
    (shard,) = pack(sequences, objective="supervised", dp=1, max_tokens_per_microbatch=64).shards
    assert shard.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert shard.loss_mask.tolist() == [False, False, True, True, False, True]
    assert shard.loss_weights.tolist() == pytest.approx([1 / 3, 1 / 3])
    assert shard.streams == {}


@pytest.mark.parametrize("sent", [np.uint8, np.uint16, np.int32])
def test_expert_choices_lie_beside_their_tokens_as_small_as_can_be(sent: type) -> None:
    """int32: as journals of older versions hold them."""

    def routed(first: int) -> RoutedExperts:
        indices = np.arange(first, first + 12, dtype=sent)
        return RoutedExperts(indices=indices.tobytes(), num_tokens=3, num_layers=2, topk=2)

    trajectories = [make_trajectory([1, 2], [3, 4], routed_experts=routed(n)) for n in (0, 100)]
    group = make_group([make_sample(trajectory) for trajectory in trajectories])
    (shard,) = _pack(load_objective("policy", Recipe()).sequences([group])).shards
    assert shard.routed_experts.shape == (8, 2, 2) and shard.routed_experts.dtype == np.uint8
    assert shard.routed_experts[4].tolist() == [[100, 101], [102, 103]]
    assert not shard.routed_experts[[3, 7]].any(), "the last token of a sequence is no input"


def test_experts_beyond_256_take_two_bytes() -> None:
    indices = np.array([[[0, 383]], [[256, 1]]], np.uint16)
    routed = RoutedExperts(indices=indices.tobytes(), num_tokens=2, num_layers=1, topk=2)
    group = make_group([make_sample(make_trajectory([1, 2], [3], routed_experts=routed))])
    (shard,) = _pack(load_objective("policy", Recipe()).sequences([group])).shards
    assert shard.routed_experts.dtype == np.uint16
    assert shard.routed_experts[:2].tolist() == indices.tolist()


def test_a_rank_is_sent_its_own_part_alone() -> None:
    sequences = [_sequence(20, group=index) for index in range(16)]
    (whole,) = _pack(sequences).shards
    shards = _pack(sequences, dp=4).shards
    assert max(shard.size_bytes for shard in shards) < 0.3 * whole.size_bytes
