"""PackedTokens under a layout against plain loops over the unpacked sequences, for random ragged
batches. Called by `world.py` through `cases`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from milescli.plan.types import TrainerLayout
from milescli.train.base import TrainSequence
from milescli.train.packed_tokens import PackedTokens
from milescli.train.packing import pack
from milescli.train.streams import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A random batch, and how it is cut."""

    sequences: list[TrainSequence]
    cap: int
    updates: int

    @classmethod
    def draw(cls, seed: int) -> Example:
        """Lengths from one token on, whole masks empty at times."""
        rng = np.random.default_rng(seed)
        sequences = []
        for number in range(rng.integers(2, 14)):
            length = int(rng.integers(1, 30))
            mask = rng.random(length) < rng.choice([0.0, 0.3, 0.9])
            mask[0] = False
            sequences.append(
                TrainSequence(
                    token_ids=rng.integers(0, 100, length).astype(np.int32),
                    loss_mask=mask,
                    streams={Stream.ADVANTAGE: rng.standard_normal(length).astype(np.float32)},
                    token_weight=float(rng.random()),
                    share=1.0,
                    group=number // 2,
                )
            )
        return cls(
            sequences=sequences, cap=int(rng.integers(20, 90)), updates=int(rng.integers(1, 4))
        )


def packed_tokens_differ(
    *, rank: int, size: int, port: int, model: str, layout: dict, examples: int
) -> list[tuple[int, str, float]]:
    """(seed, what, largest difference) of every example, by rank 0."""
    from milescli.backends.megatron import cpu_compat

    cpu_compat.install()
    from milescli.backends.megatron import mesh
    from milescli.backends.megatron.step.shard import RankShard
    from milescli.models import load_facts

    own = mesh.bring_up(
        layout=TrainerLayout(**layout),
        rank=rank,
        master=("127.0.0.1", port),
        backend="gloo",
        device=torch.device("cpu"),
        timeouts_s=(60, 60),
    )
    facts = load_facts(Path(model))
    differences = []
    for seed in range(examples):
        example = Example.draw(seed)
        batch = pack(
            example.sequences,
            objective="-",
            dp=own.layout.dp,
            max_tokens_per_microbatch=example.cap,
            updates=example.updates,
        )
        shard = RankShard(batch.shards[own.dp_rank], mesh=own, facts=facts)
        measured = _measure(shard) | {"counts": own.tp_rank == 0 and own.pp_rank == 0}
        everywhere: list[object] = [None] * size
        dist.all_gather_object(everywhere, measured)
        if rank == 0:
            differences += [
                (seed, name, value) for name, value in _compare(example, everywhere).items()
            ]
    mesh.tear_down()
    return differences


def _value(tokens: PackedTokens, shard, ids: torch.Tensor) -> torch.Tensor:
    """[S] a made-up log-prob of each token, by its sequence's number and its place there."""
    number = tokens.spread(ids.float())
    return -torch.frac(0.137 * number + 0.311 * tokens.places.offset.float()) - 0.1


def _measure(shard) -> dict[str, object]:
    """What this rank sees, keyed by the numbers of sequences and tokens."""
    ids_of = torch.from_numpy(shard.shard.sequence_ids)
    sums, scans, gradients, total = {}, {}, {}, 0.0
    for microbatch in shard.microbatches:
        ids = ids_of[microbatch.indices]
        probe = shard.tokens_of(
            microbatch,
            logprobs=torch.zeros(len(microbatch.source)),
            entropy=torch.zeros(len(microbatch.source)),
        )
        logprobs = _value(probe, shard, ids).requires_grad_()
        tokens = shard.tokens_of(microbatch, logprobs=logprobs, entropy=logprobs.detach())
        per_sequence = tokens.sum_by_sequence(logprobs)
        whole = tokens.whole_sequences(torch.where(tokens.loss_mask, logprobs, 0.0))
        behind = tokens.own_part(whole.cumsum(dim=1))
        loss = tokens.spread(per_sequence.square()) * tokens[Stream.ADVANTAGE] + behind.square()
        loss = (torch.where(tokens.loss_mask, loss, 0.0) * tokens.loss_weights).sum()
        loss.backward()
        total += float(loss)
        real = tokens.places.sequence < tokens.num_sequences
        keys = list(
            zip(
                tokens.spread(ids.float())[real].long().tolist(),
                tokens.places.offset[real].tolist(),
                strict=True,
            )
        )
        gradients |= dict(zip(keys, logprobs.grad[real].tolist(), strict=True))
        scans |= dict(zip(keys, behind[real].tolist(), strict=True))
        sums |= dict(zip(ids.tolist(), per_sequence.tolist(), strict=True))
    tokens = shard.all_tokens()
    advantage = tokens[Stream.ADVANTAGE]
    return {
        "sums": sums,
        "scans": scans,
        "gradients": gradients,
        "loss": total,
        "mean": float(tokens.reduce(advantage, "mean")),
        "sum": float(tokens.reduce(advantage, "sum")),
        "max": float(tokens.reduce(advantage, "max")),
    }


def _compare(example: Example, everywhere: list[dict]) -> dict[str, float]:
    """Against loops over the sequences as they are."""
    expected = _unpacked(example, weights=_weights(example))
    merged: dict[str, dict] = {"sums": {}, "scans": {}, "gradients": {}}
    for name, whole in merged.items():
        for part in everywhere:
            whole |= part[name]
    apart = {
        name: max((_apart(whole[key], expected[name][key]) for key in expected[name]), default=0.0)
        for name, whole in merged.items()
    }
    total = sum(part["loss"] for part in everywhere if part["counts"])
    apart["loss"] = _apart(total, expected["loss"])
    for name in ("mean", "sum", "max"):
        apart[name] = max(_apart(part[name], expected[name]) for part in everywhere)
    return apart


def _apart(value: float, expected: float) -> float:
    """Relative to the larger of 1 and what is expected."""
    return 0.0 if value == expected else abs(value - expected) / max(1.0, abs(expected))


def _weights(example: Example) -> dict[int, float]:
    """Of each trained token of a sequence, by the definition of an update's mean."""
    groups = list(dict.fromkeys(sequence.group for sequence in example.sequences))
    parts = np.array_split(np.array(groups), min(example.updates, len(groups)))
    weights = {}
    for part in parts:
        members = [
            number
            for number, sequence in enumerate(example.sequences)
            if sequence.group in part and sequence.loss_mask.any()
        ]
        divisor = sum(example.sequences[number].share for number in members)
        for number in members:
            weights[number] = example.sequences[number].token_weight / divisor
    return weights


def _unpacked(example: Example, *, weights: dict[int, float]) -> dict[str, object]:
    sums, scans, gradients, loss, trained = {}, {}, {}, 0.0, []
    for number, sequence in enumerate(example.sequences):
        places = torch.arange(1, len(sequence.token_ids), dtype=torch.float64)
        logprobs = (-torch.frac(0.137 * number + 0.311 * places) - 0.1).requires_grad_()
        mask = torch.from_numpy(sequence.loss_mask[1:])
        advantage = torch.from_numpy(sequence.streams[Stream.ADVANTAGE][1:]).double()
        masked = torch.where(mask, logprobs, 0.0)
        behind = masked.cumsum(0)
        term = torch.where(mask, masked.sum().square() * advantage + behind.square(), 0.0)
        value = term.sum() * weights.get(number, 0.0)
        if len(places):
            value.backward()
        loss += float(value)
        trained += advantage[mask].tolist()
        sums[number] = float(masked.sum())
        for place in range(len(places)):
            scans[number, place + 1] = float(behind[place])
            gradients[number, place + 1] = float(logprobs.grad[place])
    return {
        "sums": sums,
        "scans": scans,
        "gradients": gradients,
        "loss": loss,
        "mean": sum(trained) / max(len(trained), 1),
        "sum": sum(trained),
        "max": max(trained, default=float("-inf")),
    }
