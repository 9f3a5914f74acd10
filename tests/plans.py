"""A small plan by hand, for tests of what works by one."""

from __future__ import annotations

from milescli.plan.types import BatchPlan, EngineLayout, Plan, Slot, TrainerLayout

PLAN = Plan(
    device_kind="cpu",
    collective="gloo",
    precision="fp32",
    trainer=TrainerLayout(dp=2),
    engines=EngineLayout(),
    colocated=True,
    channel="tensor",
    slots=[Slot(node=0, device=0, trainer_rank=0), Slot(node=0, device=1, trainer_rank=1)],
    batch=BatchPlan(
        prompts_per_step=2,
        samples_per_prompt=2,
        num_samples=4,
        updates_per_step=1,
        max_tokens_per_microbatch=64,
        max_sequence_tokens=64,
    ),
    cpu_threads=1,
    max_staleness=0,
    steps=1,
    warmup_steps=0,
)

"""Two trainer ranks of a CPU, without engines."""
