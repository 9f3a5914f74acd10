"""A Plan on the screen and as JSON: layout, placement, batch arithmetic, each choice with its reason; with -v who set what."""

from __future__ import annotations

import json
import os

from milescli.console.output import Mode, Output
from milescli.plan.types import Plan, Slot
from milescli.recipe.load import LoadedRecipe, value_at

ENVIRONMENT = (
    "MILES_",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NCCL_",
    "GLOO_",
)
"""Variables that change what runs; shown by -v."""


def show_plan(plan: Plan, loaded: LoadedRecipe, *, output: Output, with_origins: bool) -> None:
    """All that would run, and why."""
    payload: dict[str, object] = {"plan": json.loads(plan.to_json()), "fingerprint": plan.fingerprint}
    if with_origins:
        payload["recipe"] = {
            name: {"value": value_at(loaded.recipe, name), "origin": str(by)} for name, by in loaded.origins.items()
        }
        payload["environment"] = _environment()
    output.json("plan", payload)
    output.kv(_layout(plan), title=f"plan {plan.fingerprint} for {loaded.recipe.name}")
    output.blank()
    output.kv(_batch(plan), title="one step")
    output.blank()
    output.table(["node", "device", "trainer rank", "engine"], [_slot_row(slot) for slot in plan.slots], title="placement")
    output.blank()
    if plan.decisions:
        rows = [(choice.key, choice.value, choice.reason) for choice in plan.decisions]
        output.table(["chosen", "value", "because"], rows, title="decisions")
        output.blank()
    if with_origins and output.mode is not Mode.JSON:
        _show_origins(loaded, output)
    output.note("nothing was started")


def _layout(plan: Plan) -> dict[str, object]:
    trainer, engines = plan.trainer, plan.engines
    sizes = " x ".join(f"{axis} {getattr(trainer, axis)}" for axis in ("tp", "pp", "cp", "dp"))
    experts = f", ep {trainer.ep}, etp {trainer.etp}" if trainer.ep * trainer.etp > 1 else ""
    sequence = ", sequence parallel" if trainer.sequence_parallel else ""
    where = "on the trainer's devices, taking turns" if plan.colocated else "on devices of their own"
    return {
        "devices": f"{plan.device_kind}, {plan.precision}, {plan.collective}"
        + (f", {plan.cpu_threads} threads each" if plan.device_kind == "cpu" else ""),
        "trainer": f"{trainer.world_size} rank{'s' * (trainer.world_size > 1)}: {sizes}{experts}{sequence}",
        "engines": f"{engines.num} x tp {engines.tp}, {where}; {engines.max_running_requests} requests at once, "
        f"context {engines.context_length}",
        "weights": f"channel {plan.channel}",
        "staleness": f"at most {plan.max_staleness}; old logprobs from the {plan.old_logprobs}",
        "steps": (f"{plan.warmup_steps} warm-up, " if plan.warmup_steps else "") + f"{plan.steps} RL",
    }


def _batch(plan: Plan) -> dict[str, object]:
    batch = plan.batch
    most_tokens = batch.num_samples * batch.max_sequence_tokens
    per_update = batch.num_samples // batch.updates_per_step
    return {
        "samples": f"{batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples = {batch.num_samples}",
        "tokens": f"at most {batch.num_samples} x {batch.max_sequence_tokens} = {most_tokens:,}",
        "updates": f"{batch.updates_per_step} x {per_update} samples, in microbatches of at most "
        f"{batch.max_tokens_per_microbatch:,} tokens a rank",
    }


def _slot_row(slot: Slot) -> list[object]:
    engine = (
        None
        if slot.engine is None
        else f"{slot.engine}" + (f" (rank {slot.engine_rank})" if slot.engine_rank is not None else "")
    )
    rank = None if slot.trainer_rank is None else str(slot.trainer_rank)
    return [str(slot.node), str(slot.device), rank, engine]


def _show_origins(loaded: LoadedRecipe, output: Output) -> None:
    rows = []
    for name, origin in loaded.origins.items():
        value = value_at(loaded.recipe, name)
        rows.append((name, "null" if value is None else str(value).lower() if isinstance(value, bool) else value, str(origin)))
    output.table(["key", "value", "origin"], [(name, str(value), by) for name, value, by in rows], title="recipe")
    output.blank()
    output.kv(_environment() or {"(none)": ""}, title="environment")
    output.blank()


def _environment() -> dict[str, object]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)}
