"""Runs a trainer of one rank for a tiny model, which takes an optimizer step and publishes to one
engine. For `trials`; consists of the parts of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from milescli.core.errors import MachineError
from milescli.core.examples import example_groups
from milescli.core.types import EngineAddress, Group, Trajectory, WeightVersion
from milescli.data.chat_masks import demonstration_trajectory
from milescli.doctor.finding import REPORT
from milescli.plan.types import BatchPlan, EngineLayout, Plan, Slot, TrainerLayout
from milescli.recipe.schema import Recipe

if TYPE_CHECKING:
    from milescli.backends.megatron.worker import TrainerRank
    from milescli.train.base import TrainBatch

LEARNING_RATE = 1e-2
"""Large enough that a step is visible in log-probs."""
CHANNEL = "milescli.backends.sglang.weights.channels:TensorChannel"


def tiny_plan(kind: Literal["cuda", "rocm", "cpu"]) -> Plan:
    """Plan one rank and one engine on one slot, with four samples per step."""
    return Plan(
        device_kind=kind,
        collective="gloo" if kind == "cpu" else "nccl",
        precision="fp32" if kind == "cpu" else "bf16",
        trainer=TrainerLayout(),
        engines=EngineLayout(),
        colocated=True,
        channel="tensor",
        slots=[Slot(node=0, device=0, trainer_rank=0, engine=0, engine_rank=0)],
        batch=BatchPlan(
            prompts_per_step=1,
            samples_per_prompt=4,
            num_samples=4,
            updates_per_step=1,
            max_tokens_per_microbatch=512,
            max_sequence_tokens=64,
        ),
        cpu_threads=1,
        max_staleness=0,
        steps=1,
        warmup_steps=0,
    )


def start_trainer(model_dir: Path, kind: Literal["cuda", "rocm", "cpu"]) -> TrainerRank:
    """Start a rank that holds the model and can publish to an engine; the caller closes it."""
    return start_rank(tiny_plan(kind), model_dir, channel=CHANNEL)


def start_rank(
    plan: Plan, model_dir: Path, *, channel: str | None = None, recipe: Recipe | None = None
) -> TrainerRank:
    """Start the only rank of a plan in this process; the caller closes it. `channel` is as for
    `TrainerRank`; `recipe` None means all defaults."""
    from milescli.backends.megatron.worker import TrainerRank
    from milescli.platform.ports import free_ports

    trainer = TrainerRank(
        rank=0,
        world_size=1,
        master_addr="127.0.0.1",
        master_port=free_ports(1)[0],
        recipe=recipe or Recipe(),
        plan=plan,
        model_dir=str(model_dir),
        channel=channel,
    )
    trainer.setup()
    return trainer


def take_step(trainer: TrainerRank) -> str:
    """Take one optimizer step, which must change every trained weight. Return a description of the
    result for people. Raises MachineError."""
    before = trainer.parameter_checksums()
    (shard,) = _pack(example_groups()[:1], objective="policy").shards
    report = trainer.step(shard, LEARNING_RATE).report
    changed = sum(before[name] != after for name, after in trainer.parameter_checksums().items())
    # of experts, those learn that tokens were sent to
    others = sum(".experts." not in name for name in before)
    if not math.isfinite(report.loss) or not report.grad_norm > 0 or changed < others // 2:
        raise MachineError(
            "the trainer does not learn here",
            why=f"loss {report.loss}, gradient norm {report.grad_norm}; a step changed {changed} "
            f"of {len(before)} weights",
            fix=REPORT,
        )
    return (
        f"loss {report.loss:.3g}, gradient norm {report.grad_norm:.3g}, {changed} of "
        f"{len(before)} weights changed"
    )


def publish_exactly(trainer: TrainerRank, url: str) -> None:
    """Send all weights to the engine at `url`, then compare those that it holds bit for bit. Raises
    MismatchError."""
    trainer.connect_engines([EngineAddress(url=url, tp=1, sharing_ranks=[0])])
    trainer.publish(WeightVersion(1))
    trainer.verify()


def score(
    trainer: TrainerRank,
    prompt_ids: list[int],
    response_ids: list[int],
    *,
    with_other_rounding: bool = False,
) -> list[float]:
    """Return [len(response_ids)] log-probs, one for each token of a response."""
    (shard,) = _pack(
        [demonstration_trajectory(prompt_ids, response_ids)], objective="supervised"
    ).shards
    scored = trainer.score(shard, with_other_rounding)
    assert scored is not None, "one rank speaks for all tokens"
    return scored[0][len(prompt_ids) :].tolist()


def _pack(items: Sequence[Group] | Sequence[Trajectory], *, objective: str) -> TrainBatch:
    from milescli.train.objectives import load_objective
    from milescli.train.packing import pack

    sequences = load_objective(objective, Recipe()).sequences(items)
    return pack(sequences, objective=objective, dp=1, max_tokens_per_microbatch=512)
