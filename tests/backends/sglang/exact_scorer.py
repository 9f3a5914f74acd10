"""What a trainer of one rank under `train.on_policy: exact` says of rows of tokens: log-probs of
every token after the first. In a process of its own, since nobody turns that off again: `python -m
tests.backends.sglang.exact_scorer REQUEST.json`, with {"folder", "precision", "threads",
"temperature", "rows", "microbatch_tokens", "out"}."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from milescli.data.chat_masks import demonstration_trajectory
from milescli.doctor.tiny_trainer import start_rank, tiny_plan
from milescli.recipe.schema import Recipe
from milescli.train.objectives import load_objective
from milescli.train.packing import pack


def main() -> None:
    """`out`: a safetensors file with `I` [tokens - 1] of row I."""
    request = json.loads(Path(sys.argv[1]).read_text())
    tokens = request["microbatch_tokens"]
    plan = tiny_plan("cpu")
    batch = replace(plan.batch, max_tokens_per_microbatch=tokens, max_sequence_tokens=tokens)
    plan = replace(
        plan,
        on_policy="exact",
        precision=request["precision"],
        cpu_threads=request["threads"],
        batch=batch,
    )
    rank = start_rank(plan, Path(request["folder"]))
    sequences = load_objective("supervised", Recipe()).sequences(
        [demonstration_trajectory(row[:1], row[1:]) for row in request["rows"]]
    )
    (shard,) = pack(
        sequences,
        objective="supervised",
        dp=1,
        max_tokens_per_microbatch=tokens,
        temperature=request["temperature"],
    ).shards
    scored = dict(zip(shard.sequence_ids.tolist(), rank.score(shard), strict=True))
    rank.close()
    save_file({str(i): torch.tensor(row[1:]) for i, row in scored.items()}, request["out"])


if __name__ == "__main__":
    main()
