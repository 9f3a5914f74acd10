"""A trainer rank for a case, and what it trains on: a plan, batches of uneven samples, rows of
tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from milescli.core.types import Group, Prompt, RoutedExperts
from milescli.data.chat_masks import demonstration_trajectory
from milescli.plan.types import BatchPlan, EngineLayout, Plan, TrainerLayout
from milescli.platform.ports import free_ports
from milescli.recipe.schema import Recipe
from milescli.train.base import TrainShard
from milescli.train.objectives import load_objective
from milescli.train.packing import pack
from tests.samples import make_group, make_sample, make_trajectory

if TYPE_CHECKING:
    from milescli.backends.megatron.worker import TrainerRank

MICROBATCH_TOKENS = 96
"""Cuts a batch into three or four microbatches, or two for each of two data-parallel ranks."""


def plan_of(layout: dict, *, precision: str = "fp32") -> Plan:
    """A CPU plan around a trainer layout."""
    return Plan(
        device_kind="cpu",
        collective="gloo",
        precision=precision,
        trainer=TrainerLayout(**layout),
        engines=EngineLayout(),
        colocated=False,
        channel="tensor",
        slots=[],
        batch=BatchPlan(
            prompts_per_step=4,
            samples_per_prompt=4,
            num_samples=16,
            updates_per_step=1,
            max_tokens_per_microbatch=MICROBATCH_TOKENS,
            max_sequence_tokens=48,
        ),
        cpu_threads=1,
        max_staleness=0,
        steps=3,
        warmup_steps=0,
    )


def make_groups(
    step: int,
    *,
    vocab_size: int,
    routing: tuple[int, int, int] | None = None,
    sources: Sequence[str] = (),
    longest_prompt: int = 8,
) -> list[Group]:
    """Four prompts with four samples each, all lengths uneven. `routing`: (experts, layers, topk)
    of random expert choices; `sources`: which the prompts are from, in turn."""
    rng = np.random.default_rng(step)
    groups = []
    for index in range(4):
        prompt = rng.integers(0, vocab_size, rng.integers(1, longest_prompt + 1)).tolist()
        samples = []
        for number in range(4):
            response = rng.integers(0, vocab_size, rng.integers(1, 25)).tolist()
            trajectory = make_trajectory(
                prompt,
                response,
                logprobs=(-5 + 0.1 * rng.standard_normal(len(response))).tolist(),
                mask=(rng.random(len(response)) < 0.9).tolist(),
                routed_experts=_routing(rng, len(prompt) + len(response) - 1, routing)
                if routing
                else None,
            )
            reward = float(rng.integers(0, 2))
            samples.append(make_sample(trajectory, reward=reward, index=number))
        source = sources[index % len(sources)] if sources else None
        prompt_made = Prompt(index=index, token_ids=prompt, text="", source=source)
        groups.append(make_group(samples, prompt=prompt_made))
    return groups


def _routing(
    rng: np.random.Generator, num_tokens: int, routing: tuple[int, int, int]
) -> RoutedExperts:
    experts, layers, topk = routing
    chosen = np.argsort(rng.random((num_tokens, layers, experts)), axis=-1)[..., :topk].astype(
        np.int32
    )
    return RoutedExperts(
        indices=chosen.tobytes(), num_tokens=num_tokens, num_layers=layers, topk=topk
    )


def policy_shard(
    made: TrainerRank,
    step: int,
    *,
    updates: int = 1,
    routing: tuple[int, int, int] | None = None,
    objective: str = "policy",
    sources: Sequence[str] = (),
    longest_prompt: int = 8,
    cap: int = MICROBATCH_TOKENS,
    shares_prompts: bool = False,
) -> TrainShard:
    """What this rank gets of the batch of a step."""
    groups = make_groups(
        step,
        vocab_size=made.facts.vocab_size,
        routing=routing,
        sources=sources,
        longest_prompt=longest_prompt,
    )
    batch = pack(
        load_objective(objective, made.recipe).sequences(groups),
        objective=objective,
        dp=made.mesh.layout.dp,
        max_tokens_per_microbatch=cap,
        updates=updates,
        temperature=0.9,
        shares_prompts=shares_prompts,
    )
    return batch.shards[made.mesh.dp_rank]


def rows_shard(made: TrainerRank, rows: list[list[int]], *, cap: int = 64) -> TrainShard:
    """Rows of tokens, all but the first of each on the loss mask; of one data-parallel rank."""
    sequences = load_objective("supervised", made.recipe).sequences(
        [demonstration_trajectory(row[:1], row[1:]) for row in rows]
    )
    batch = pack(
        sequences,
        objective="supervised",
        dp=made.mesh.layout.dp,
        max_tokens_per_microbatch=cap,
    )
    return batch.shards[made.mesh.dp_rank]


def scores_everywhere(made: TrainerRank, shard: TrainShard) -> list[list[float]]:
    """[sequences of the batch][tokens], put together from all ranks."""
    return [values.tolist() for values in everywhere(made, made.score, shard)]


def everywhere(made: TrainerRank, ask: Callable[[TrainShard], Any], shard: TrainShard) -> list[Any]:
    """What is said of each sequence of the batch, put together from all ranks."""
    own = ask(shard)
    told: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own and (shard.sequence_ids.tolist(), own))
    rows = {number: values for part in told if part for number, values in zip(*part, strict=True)}
    return [rows[number] for number in sorted(rows)]


def trainer(
    *,
    rank: int,
    size: int,
    port: int,
    model: str,
    layout: dict,
    train: dict | None = None,
    precision: str = "fp32",
    teachers: Sequence[str] = (),
    mix: Sequence[str] = (),
    critic: str | None = None,
    draft: str | None = None,
    adapter: str | None = None,
    vision: str = "frozen",
    indexer: str = "frozen",
    seed: int = 0,
    turns: Mapping[str, dict] | None = None,
    formats: Mapping[str, Any] | None = None,
):
    """A trainer rank that is set up. `teachers`, `critic`, `draft`, `adapter`: folders; `mix`:
    sources of its prompts; `turns`: seed and train of several adapters, by name; `formats`: fields
    of the plan about number formats."""
    from milescli.backends.megatron.worker import TrainerRank

    optimizer = {
        "lr": 1e-2,
        "eps": 1e-3,
        "weight_decay": 0.01,
        **(train or {}).pop("optimizer", {}),
    }

    def recipe(own: dict, seed: int) -> Recipe:
        return Recipe(
            model={"adapter": adapter, "vision": vision, "indexer": indexer},
            train={"optimizer": optimizer, **(train or {}), **own},
            data={"mix": [{"path": name} for name in mix]} if mix else {},
            machine={"start_timeout_s": 60, "step_timeout_s": 60},
            run={"seed": seed},
        )

    made = TrainerRank(
        rank=rank,
        world_size=size,
        master_addr="127.0.0.1",
        master_port=port,
        recipe=recipe({}, seed),
        plan=replace(
            plan_of(
                {"recompute": (train or {}).get("recompute", "none"), **layout},
                precision=precision,
            ),
            **(formats or {}),
        ),
        model_dir=model,
        teacher_dirs=teachers,
        critic_dir=critic,
        adapters={n: recipe(each["train"], each["seed"]) for n, each in (turns or {}).items()},
        draft_dir=draft,
    )
    made.setup()
    return made


def another_port() -> int:
    """A free one, where the new ranks meet."""
    port = free_ports(1)
    dist.broadcast_object_list(port, src=0)
    return port[0]
