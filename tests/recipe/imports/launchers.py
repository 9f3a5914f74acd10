"""A launcher in Python as those of Miles are, written for these tests."""

from __future__ import annotations

MILES_PYTHON = '''"""A run of Miles."""
import os
from dataclasses import dataclass
from typing import Literal

import miles.utils.external_utils.command_utils as U

SHAPES = {"small": "Base-1B", "large": "Base-8B"}


@dataclass
class Layout:
    tp: int = 1
    cp: int = 1


@dataclass
class Settings(U.ExecuteTrainConfig):
    size: Literal["small", "large"] = "small"
    responses: int | None = None
    run_id: str = U.create_run_id()
    filters: bool = True

    def __post_init__(self):
        self.responses = self.responses or 4 * 2

    @property
    def layout(self):
        return Layout(tp=4 if self.size == "large" else 2)


def _where(args):
    return f"--actor-num-nodes {args.num_nodes} --actor-num-gpus-per-node 8 "


def run(args: Settings):
    base = "/models/" + SHAPES[args.size]
    text = f"--hf-checkpoint {base} --save {args.run_id}/ckpt "
    text += (
        "--prompt-data a.jsonl "
        "--rollout-batch-size 16 "
        # "--rollout-batch-size 999 "
        f"--n-samples-per-prompt {args.responses} "
        f"--global-batch-size {16 * args.responses // 2} "
    )
    if args.filters and args.size != "huge":
        text += "--dynamic-sampling-filter-path miles.check_reward_nonzero_std "
    match (args.size, args.num_nodes):
        case ("small", 1):
            text += "--lr 2e-6 "
        case ("large", _):
            text += "--lr 5e-7 "
        case _:
            raise NotImplementedError
    if U.is_fast():
        text += "--use-tis "
    if os.environ.get("OFFLOAD", "0") != "0":
        text += "--optimizer-cpu-offload "
    U.execute_train(
        train_args=f"{text} {_where(args)} {U.get_default_wandb_args(__file__, id=args.run_id)} "
        f"--tensor-model-parallel-size {args.layout.tp} "
        f"{'--colocate ' if args.layout.cp == 1 else ''}",
        config=args,
    )
'''
