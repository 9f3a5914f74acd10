"""What a trainer of one rank says of rows of tokens that it routes as an engine did: log-probs of
every token after the first. In a process of its own: `python -m tests.backends.sglang.replayer
REQUEST.json`, with {"jobs": [{"folder", "rows", "experts", "shape", "out"}]}; `experts`: the record
of each row in base64."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from milescli.core.types import RoutedExperts
from milescli.data.chat_masks import demonstration_trajectory
from milescli.platform.ports import free_ports
from milescli.train.objectives import load_objective
from milescli.train.packing import pack
from tests.backends.megatron.harness import scores_everywhere, trainer


def main() -> None:
    """`out`: a safetensors file with `logprobs.I` [tokens - 1] of row I."""
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text())["jobs"]:
        save_file(scores(job), job["out"])


def scores(job: dict) -> dict[str, torch.Tensor]:
    made = trainer(
        rank=0,
        size=1,
        port=free_ports(1)[0],
        model=job["folder"],
        layout={},
        train={"routing_replay": True},
    )
    layers, topk = job["shape"]
    trajectories = [
        replace(
            demonstration_trajectory(row[:1], row[1:]),
            routed_experts=RoutedExperts(
                indices=base64.b64decode(record),
                num_tokens=len(row) - 1,
                num_layers=layers,
                topk=topk,
            ),
        )
        for row, record in zip(job["rows"], job["experts"], strict=True)
    ]
    sequences = load_objective("supervised", made.recipe).sequences(trajectories)
    batch = pack(sequences, objective="supervised", dp=1, max_tokens_per_microbatch=64)
    rows = scores_everywhere(made, batch.shards[0])
    made.close()
    return {f"logprobs.{index}": torch.tensor(row[1:]) for index, row in enumerate(rows)}


if __name__ == "__main__":
    main()
