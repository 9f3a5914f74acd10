"""A trainer of one rank by itself, without Ray and without an engine, and a batch for it. Used by
`bench/train.py` and by the checks `train` and `memory`."""

from __future__ import annotations

import gc
import os
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from milescli.backends.megatron.worker import TrainerRank
from milescli.core.types import Group, Prompt, Sample, StopReason, Trajectory
from milescli.data.chat_masks import demonstration_trajectory
from milescli.doctor.tiny_trainer import start_rank
from milescli.plan.types import BatchPlan, EngineLayout, Plan, TrainerLayout
from milescli.recipe.schema import Recipe
from milescli.train.base import TrainShard
from milescli.train.objectives import load_objective
from milescli.train.packing import pack


def make_trainer(
    folder: Path,
    *,
    microbatch_tokens: int,
    recompute: Literal["none", "full"] = "none",
    threads: int | None = None,
) -> TrainerRank:
    """One rank, set up, of the model in `folder`. `threads`: None for all cores."""
    on_device = torch.cuda.is_available()
    kind = "rocm" if torch.version.hip else "cuda"
    plan = Plan(
        device_kind=kind if on_device else "cpu",
        collective="nccl" if on_device else "gloo",
        precision="bf16" if on_device else "fp32",
        trainer=TrainerLayout(recompute=recompute),
        engines=EngineLayout(),
        colocated=False,
        channel="tensor",
        slots=[],
        batch=BatchPlan(
            prompts_per_step=1,
            samples_per_prompt=1,
            num_samples=1,
            updates_per_step=1,
            max_tokens_per_microbatch=microbatch_tokens,
            max_sequence_tokens=microbatch_tokens,
        ),
        cpu_threads=threads or len(os.sched_getaffinity(0)),
        max_staleness=0,
        steps=1,
        warmup_steps=0,
    )
    return start_rank(plan, folder)


def make_shard(
    lengths: Sequence[int] | np.ndarray,
    *,
    vocab_size: int,
    microbatch_tokens: int,
    kind: Literal["policy", "supervised"] = "policy",
    seed: int = 0,
) -> TrainShard:
    """Random tokens in sequences of these lengths; the first quarter of each is the prompt."""
    rng = np.random.default_rng(seed)
    trajectories = [
        demonstration_trajectory(
            rng.integers(0, vocab_size, length // 4).tolist(),
            rng.integers(0, vocab_size, length - length // 4).tolist(),
        )
        for length in lengths
    ]
    items: list[Group] | list[Trajectory] = trajectories
    if kind == "policy":
        samples = [
            Sample(
                sample_index=index,
                seed=index,
                trajectories=[
                    replace(trajectory, logprobs=array("f", [-6.0] * trajectory.num_tokens))
                ],
                text="",
                stop_reason=StopReason.STOP,
                reward=float(index % 2),
            )
            for index, trajectory in enumerate(trajectories)
        ]
        items = [Group(prompt=Prompt(index=0, token_ids=[0], text=""), samples=samples)]
    sequences = load_objective(kind, Recipe()).sequences(items)
    (shard,) = pack(
        sequences, objective=kind, dp=1, max_tokens_per_microbatch=microbatch_tokens
    ).shards
    return shard


def end(trainer: TrainerRank) -> None:
    """Close it, and give its memory back: hooks within autograd keep model and optimizer for as
    long as the process lives."""
    from milescli.backends.megatron.state.optimizer import inner_optimizers

    trainer.close()
    trainer.optimizer.zero_grad()
    held = [
        tensor
        for buffer in (*trainer.model.buffers, *trainer.model.expert_parallel_buffers)
        for tensor in (buffer.param_data, buffer.grad_data)
    ]
    for inner in inner_optimizers(trainer.optimizer):
        inner.optimizer.state.clear()
        held += [weight for copies in inner.shard_fp32_from_float16_groups for weight in copies]
    for tensor in held:
        tensor.untyped_storage().resize_(0)
    free_memory()


def free_memory() -> None:
    """Of what nobody names any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
