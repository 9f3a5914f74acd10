"""Steps of runs with teachers, under the layouts that `test_distillation` compares. Called by
`world.py` through `cases`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from milescli.core.types import StepReport, TeacherTokens
from milescli.data.chat_masks import demonstration_trajectory
from milescli.train.base import TrainSequence, TrainShard
from milescli.train.objectives import load_objective, sequences_from
from milescli.train.packing import pack
from tests.backends.megatron.harness import (
    MICROBATCH_TOKENS,
    everywhere,
    make_groups,
    policy_shard,
    trainer,
)

if TYPE_CHECKING:
    from milescli.backends.megatron.worker import TrainerRank

NUM_STEPS, LR = 5, 1e-2
SOURCES = ("sums", "words")
TEACHERS = ("llama", "tied")
"""Of other families and depths than the policy, which is `dense`; one for each source."""
KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"kl": "sampled", "coef": 0.5, "reward_weight": 0.7},
    "reverse": {"kl": "reverse", "coef": 0.8, "reward_weight": 0.3, "top_k": 7},
    "forward": {"kl": "forward", "top_k": 130},
    "rows": {"kl": "forward", "coef": 2.0, "top_k": 5, "cache": False},
    "rows cached": {"kl": "reverse", "coef": 2.0, "top_k": 5},
}
LAYOUTS = {
    "one": {"": {}},
    "two": {
        " tp2": {"tp": 2},
        " tp2 sp": {"tp": 2, "sequence_parallel": True},
        " dp2": {"dp": 2},
        " pp2": {"pp": 2},
        " cp2": {"cp": 2},
    },
}
"""By world: what is behind the kind in a case's name, and its layout."""


def distill_cases(which: str, models: dict[str, str]) -> list[dict[str, Any]]:
    """Those of a world."""
    return [
        {
            "name": kind + name,
            "call": "distill_steps",
            "kind": kind,
            "model": models["dense"],
            "teachers": [models[teacher] for teacher in teachers_of(kind)],
            "layout": layout,
        }
        for name, layout in LAYOUTS[which].items()
        for kind in KINDS
    ]


def teachers_of(kind: str) -> tuple[str, ...]:
    """Rows have one teacher."""
    return TEACHERS[:1] if kind.startswith("rows") else TEACHERS


def distill_steps(
    *,
    rank: int,
    size: int,
    port: int,
    kind: str,
    model: str,
    teachers: list[str],
    layout: dict[str, Any],
) -> list[StepReport]:
    """A few steps of one kind."""
    of_rows = kind.startswith("rows")
    named = [
        {"path": folder, "sources": None if of_rows else [source]}
        for folder, source in zip(teachers, SOURCES, strict=False)
    ]
    made = trainer(
        rank=rank,
        size=size,
        port=port,
        model=model,
        layout=layout,
        train={
            "objective": "distillation" if of_rows else "policy",
            "distill": {"teachers": named, **KINDS[kind]},
        },
        teachers=teachers,
        mix=() if of_rows else SOURCES,
    )
    reports = []
    for step in range(NUM_STEPS):
        shard = _rows(made, step) if of_rows else policy_shard(made, step, sources=SOURCES)
        reports.append(made.step(shard, LR).report)
    made.close()
    return reports


def _rows(made: TrainerRank, step: int) -> TrainShard:
    rows = [
        demonstration_trajectory(group.prompt.token_ids, group.samples[0].response_ids or [1])
        for group in make_groups(step, vocab_size=made.facts.vocab_size)
    ]
    objective = load_objective("distillation", made.recipe)
    if made.recipe.caches_teacher:
        plain = load_objective("supervised", made.recipe).sequences(rows)
        said = everywhere(made, made.score_by_teachers, _shard(made, plain, "supervised"))
        rows = [replace(row, teacher=_kept(*parts)) for row, parts in zip(rows, said, strict=True)]
    return _shard(made, sequences_from(objective, rows, name="distillation"), "distillation")


def _kept(ids: np.ndarray, logprobs: np.ndarray) -> TeacherTokens:
    return TeacherTokens(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), topk=ids.shape[1])


def _shard(made: TrainerRank, sequences: list[TrainSequence], objective: str) -> TrainShard:
    batch = pack(
        sequences,
        objective=objective,
        dp=made.mesh.layout.dp,
        max_tokens_per_microbatch=MICROBATCH_TOKENS,
    )
    return batch.shards[made.mesh.dp_rank]
