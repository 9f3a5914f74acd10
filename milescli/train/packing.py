"""Scored groups (or demonstrations) -> TrainBatch: packed end to end, spread over ranks and
microbatches. Pure and deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from milescli.core.types import Group, Sample
from milescli.train.base import LossKind, TrainBatch

Aggregation = Literal["token_mean", "sequence_mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """One answer, ready to be laid end to end."""

    token_ids: list[int]
    prompt_length: int
    loss_mask: Sequence[bool]
    """[response tokens]"""
    advantage: float
    logprobs: Sequence[float] | None

    @property
    def num_positions(self) -> int:
        """Tokens that have a successor."""
        return max(len(self.token_ids) - 1, 0)


def pack_policy(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    *,
    dp: int,
    max_tokens_per_microbatch: int,
    updates: int,
    aggregation: Aggregation,
    temperature: float,
    routing_replay: bool = False,
) -> TrainBatch:
    """All answers of all groups, in order. `routing_replay`: carry the engine's expert choices
    along (every sample has them)."""
    samples = [sample for group in groups for sample in group.samples]
    flat = [value for row in advantages for value in row]
    assert len(flat) == len(samples), (len(flat), len(samples))
    sequences = [
        _Sequence(
            token_ids=sample.prompt_ids + sample.response_ids,
            prompt_length=len(sample.prompt_ids),
            loss_mask=sample.loss_mask,
            advantage=advantage,
            logprobs=sample.logprobs,
        )
        for sample, advantage in zip(samples, flat, strict=True)
    ]
    return _pack(
        sequences,
        kind=LossKind.POLICY,
        temperature=temperature,
        aggregation=aggregation,
        updates=_spread(
            [sequence.num_positions for sequence in sequences],
            dp=dp,
            cap=max_tokens_per_microbatch,
            updates=updates,
        ),
        routed_experts=_routing(samples) if routing_replay else None,
    )


def pack_supervised(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    dp: int,
    max_tokens_per_microbatch: int,
    aggregation: Aggregation = "token_mean",
) -> TrainBatch:
    """(prompt ids, response ids) pairs as one optimizer update; every response token is trained
    on."""
    sequences = [
        _Sequence(
            token_ids=[*prompt, *response],
            prompt_length=len(prompt),
            loss_mask=[True] * len(response),
            advantage=0.0,
            logprobs=None,
        )
        for prompt, response in pairs
    ]
    return _pack(
        sequences,
        kind=LossKind.SUPERVISED,
        temperature=1.0,
        aggregation=aggregation,
        updates=_spread(
            [sequence.num_positions for sequence in sequences],
            dp=dp,
            cap=max_tokens_per_microbatch,
            updates=1,
        ),
        routed_experts=None,
    )


def _pack(
    sequences: Sequence[_Sequence],
    *,
    kind: LossKind,
    temperature: float,
    aggregation: Aggregation,
    updates: list[list[list[list[int]]]],
    routed_experts: torch.Tensor | None,
) -> TrainBatch:
    cu_seqlens = [0, *np.cumsum([sequence.num_positions for sequence in sequences]).tolist()]
    total = cu_seqlens[-1]
    input_ids, target_ids = np.zeros(total, np.int64), np.zeros(total, np.int64)
    mask = np.zeros(total, bool)
    advantages, logprobs = np.zeros(total, np.float32), np.zeros(total, np.float32)
    for sequence, start, end in zip(sequences, cu_seqlens, cu_seqlens[1:], strict=False):
        if start == end:
            continue
        input_ids[start:end], target_ids[start:end] = (
            sequence.token_ids[:-1],
            sequence.token_ids[1:],
        )
        first = sequence.prompt_length - 1
        assert first >= 0, "a sequence needs a prompt token before its answer"
        answer = slice(start + first, end)
        mask[answer] = sequence.loss_mask
        advantages[answer] = sequence.advantage
        if sequence.logprobs is not None:
            logprobs[answer] = sequence.logprobs
    weights = _loss_weights(mask, cu_seqlens, updates=updates, aggregation=aggregation)
    return TrainBatch(
        kind=kind,
        input_ids=torch.from_numpy(input_ids),
        target_ids=torch.from_numpy(target_ids),
        loss_mask=torch.from_numpy(mask),
        loss_weights=torch.from_numpy(weights),
        advantages=torch.from_numpy(np.where(mask, advantages, np.float32(0))),
        engine_logprobs=torch.from_numpy(np.where(mask, logprobs, np.float32(0))),
        cu_seqlens=cu_seqlens,
        updates=updates,
        temperature=temperature,
        routed_experts=routed_experts,
    )


def _loss_weights(
    mask: np.ndarray,
    cu_seqlens: list[int],
    *,
    updates: list[list[list[list[int]]]],
    aggregation: Aggregation,
) -> np.ndarray:
    """[T] as `TrainBatch.loss_weights` says; each update's weights sum to 1. Answers without a
    trained token do not count."""
    trained = np.array([int(mask[start:end].sum()) for start, end in pairwise(cu_seqlens)])
    weights = np.zeros(len(mask), np.float32)
    for update in updates:
        members = [
            index
            for rank in update
            for microbatch in rank
            for index in microbatch
            if trained[index]
        ]
        tokens = sum(int(trained[index]) for index in members)
        for index in members:
            span = slice(cu_seqlens[index], cu_seqlens[index + 1])
            share = (
                1.0 / tokens
                if aggregation == "token_mean"
                else 1.0 / (len(members) * int(trained[index]))
            )
            weights[span] = np.where(mask[span], np.float32(share), np.float32(0))
    return weights


def _routing(samples: Sequence[Sample]) -> torch.Tensor:
    """[T, num_layers, topk] int32."""
    parts = []
    for sample in samples:
        routed = sample.routed_experts
        assert routed is not None, f"sample {sample.sample_index} carries no expert choices"
        assert routed.num_tokens == sample.num_tokens - 1, (routed.num_tokens, sample.num_tokens)
        parts.append(
            np.frombuffer(routed.indices, np.int32).reshape(
                routed.num_tokens, routed.num_layers, routed.topk
            )
        )
    return torch.from_numpy(np.concatenate(parts))


def _spread(
    lengths: Sequence[int], *, dp: int, cap: int, updates: int
) -> list[list[list[list[int]]]]:
    """updates[u][d][m]: neighbouring sequences form an update; within it, ranks and microbatches
    are balanced by tokens."""
    assert lengths, "a step needs at least one sequence"
    parts = np.array_split(np.arange(len(lengths)), min(updates, len(lengths)))
    return [_balance(part.tolist(), lengths, dp=dp, cap=cap) for part in parts]


def _balance(
    members: list[int], lengths: Sequence[int], *, dp: int, cap: int
) -> list[list[list[int]]]:
    """[dp][microbatches] with the fewest microbatches for which every one holds at most `cap`
    tokens, a lone longer sequence excepted. Longest first into the emptiest bin (LPT: R. Graham,
    1969)."""
    order = sorted(members, key=lambda index: (-lengths[index], index))
    num_microbatches = max(-(-sum(lengths[index] for index in members) // (dp * cap)), 1)
    while True:
        bins: list[list[int]] = [[] for _ in range(dp * num_microbatches)]
        loads = [(0, number) for number in range(len(bins))]
        fits = True
        for index in order:
            load, number = heapq.heappop(loads)
            fits = fits and (not bins[number] or load + lengths[index] <= cap)
            bins[number].append(index)
            heapq.heappush(loads, (load + lengths[index], number))
        if fits or num_microbatches >= len(members):
            break
        num_microbatches += 1
    return [
        [sorted(bins[microbatch * dp + rank]) for microbatch in range(num_microbatches)]
        for rank in range(dp)
    ]
