"""Steps of the objectives that learn from rows, under the layouts that `test_learning_from_rows`
compares. Called by `world.py` through `cases`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from milescli.core.types import Pair
from milescli.data.chat_masks import demonstration_trajectory
from milescli.train.base import TrainShard
from milescli.train.objectives import load_objective, sequences_from
from milescli.train.packing import pack
from tests.backends.megatron.harness import MICROBATCH_TOKENS, trainer

if TYPE_CHECKING:
    from milescli.backends.megatron.step.forward import Outputs
    from milescli.backends.megatron.step.microbatch import Microbatch
    from milescli.backends.megatron.worker import TrainerRank

NUM_STEPS = 2
PREFERENCES = {"dpo": {"loss": "sigmoid", "reference": "live"}, "kto": {"loss": "kto"}}


def _case(name: str, model: str, **layout: object) -> dict[str, Any]:
    kind = name.split()[0]
    objective = "preference" if kind in PREFERENCES else kind
    train = {"preference": PREFERENCES[kind]} if kind in PREFERENCES else {}
    return {
        "name": f"rows {name}",
        "call": "row_steps",
        "model": model,
        "layout": layout,
        "objective": objective,
        "train": train,
    }


ROW_CASES = {
    "one": [
        _case("supervised", "dense"),
        _case("dpo", "dense"),
        _case("kto", "dense"),
        _case("reward_model", "dense scores"),
        _case("reward_model tied", "tied scores"),
        _case("reward_model moe", "moe scores"),
        _case("dpo v4", "v4"),
    ],
    "two": [
        *(
            _case(f"{objective} {axis}2", "dense", **{axis: 2})
            for objective in ("supervised", "dpo")
            for axis in ("tp", "dp", "pp", "cp")
        ),
        _case("kto cp2", "dense", cp=2),
        _case("dpo v4 tp2 ep2", "v4", tp=2, ep=2, sequence_parallel=True),
        _case("reward_model dp2", "dense scores", dp=2),
        _case("reward_model cp2", "dense scores", cp=2),
        _case("reward_model tied tp2 sp", "tied scores", tp=2, sequence_parallel=True),
        _case("reward_model tied pp2", "tied scores", pp=2),
        _case("reward_model moe tp2 ep2", "moe scores", tp=2, ep=2, sequence_parallel=True),
    ],
}
"""By world. A case of two ranks does what the case of one does whose name its own begins with."""
SCORED = ("dense scores", "tied scores", "llama scores", "moe scores", "v4 scores")
"""Reward models that transformers is to load."""


def row_steps(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict[str, Any],
    objective: str,
    train: dict[str, Any],
) -> dict[str, Any]:
    """A few steps, then what is measured with the weights of then: nothing may change by that."""
    made = trainer(
        rank=rank,
        size=size,
        port=port,
        model=model,
        layout=layout,
        train={"objective": objective, **train},
    )
    made.freeze_reference()
    reports = [
        made.step(rows_shard(made, objective, step), 1e-2).report for step in range(NUM_STEPS)
    ]
    before = made.parameter_checksums()
    measured = made.measure(rows_shard(made, objective, NUM_STEPS))
    unchanged = made.parameter_checksums() == before
    after = made.step(rows_shard(made, objective, NUM_STEPS), 0.0).report
    made.close()
    return {"reports": reports, "measured": measured, "after": after, "unchanged": unchanged}


def token_pairs(step: int, vocab_size: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, chosen and rejected response of eight rows."""
    rng = np.random.default_rng(step)

    def line() -> list[int]:
        return rng.integers(0, vocab_size, rng.integers(1, 18)).tolist()

    return [([*line(), 1], line(), line()) for _ in range(8)]


def rows_shard(made: TrainerRank, objective: str, step: int) -> TrainShard:
    """What this rank gets of eight rows of uneven lengths."""
    rows: list[Any] = []
    for index, (prompt, *responses) in enumerate(token_pairs(step, made.facts.vocab_size)):
        sides = [demonstration_trajectory(prompt, response) for response in responses]
        pair = Pair(index=index, chosen=sides[0], rejected=sides[1], margin=0.1 * index)
        rows.append(sides[0] if objective == "supervised" else pair)
    batch = pack(
        sequences_from(load_objective(objective, made.recipe), rows, name=objective),
        objective=objective,
        dp=made.mesh.layout.dp,
        max_tokens_per_microbatch=MICROBATCH_TOKENS,
    )
    return batch.shards[made.mesh.dp_rank]


def trained_scores(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict[str, Any],
    rows: list[list[int]],
    save: str,
) -> list[float]:
    """A reward model is trained, and its weights go to `save` as an export has them; what it says
    of each row of tokens then."""
    from milescli.backends.megatron.step.shard import RankShard
    from milescli.train.objectives.reward_model import scored_sequence

    train = {"objective": "reward_model"}
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout, train=train)
    for step in range(NUM_STEPS):
        made.step(rows_shard(made, "reward_model", step), 1e-2)
    weights = {
        name: tensor.detach().clone().contiguous()
        for bucket in made.buckets()
        for name, tensor in bucket
    }
    save_file(weights, save)
    sequences = [scored_sequence(row, group=number) for number, row in enumerate(rows)]
    batch = pack(sequences, objective="reward_model", dp=1, max_tokens_per_microbatch=32)
    own = RankShard(batch.shards[0], mesh=made.mesh, facts=made.facts)
    scores: dict[int, float] = {}

    def keep(microbatch: Microbatch, outputs: Outputs) -> torch.Tensor:
        assert outputs.scores is not None
        tokens = own.tokens_of(microbatch, scores=outputs.scores)
        numbers = own.shard.sequence_ids[microbatch.indices].tolist()
        scores.update(zip(numbers, tokens.sum_by_sequence(outputs.scores).tolist(), strict=True))
        return outputs.scores.sum()

    made.policy.passes.measure(own.microbatches, keep, temperature=1.0)
    made.close()
    return [scores[number] for number in range(len(rows))]
