"""The arithmetic of one step: what is trained on, and whether ranks and microbatches can hold it.
Pure; called by `make`."""

from __future__ import annotations

from milescli.core.errors import FitError
from milescli.plan.decisions import Log
from milescli.plan.types import BatchPlan, TrainerLayout
from milescli.recipe.schema import Recipe


def batch_plan(recipe: Recipe, trainer: TrainerLayout, cap: int, log: Log) -> BatchPlan:
    """`cap`: tokens of a microbatch on one rank. Raises FitError where a sequence does not fit into
    it, or a step is too small for the ranks."""
    if recipe.learns_from_rows:
        return _batch_of_rows(recipe, trainer, cap, log)
    prompts, group = recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt
    longest = recipe.longest_sequence
    num_samples, updates = prompts * group, recipe.train.updates_per_step
    if longest > cap * trainer.cp:
        raise FitError(
            f"a sequence of {longest} tokens does not fit into a microbatch",
            why=f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + "
            f"rollout.max_response_tokens {recipe.rollout.max_response_tokens} = {longest}"
            f" > train.max_tokens_per_microbatch {cap} x cp {trainer.cp}",
            fix=f"--set train.max_tokens_per_microbatch={-(-longest // trainer.cp)}",
        )
    if num_samples < trainer.dp * updates:
        raise FitError(
            f"{num_samples} samples a step are too few for {trainer.dp} data-parallel ranks x "
            f"{updates} updates",
            why=f"prompts_per_step {prompts} x samples_per_prompt {group} = {num_samples} < "
            f"{trainer.dp * updates}",
            fix=f"--set rollout.prompts_per_step={-(-trainer.dp * updates // group)}",
        )
    log.note(
        "batch",
        f"{num_samples} samples",
        f"{prompts} prompts x {group}; at most {cap} tokens a microbatch and rank",
    )
    return BatchPlan(
        prompts_per_step=prompts,
        samples_per_prompt=group,
        num_samples=num_samples,
        updates_per_step=updates,
        max_tokens_per_microbatch=cap,
        max_sequence_tokens=longest,
    )


def _batch_of_rows(recipe: Recipe, trainer: TrainerLayout, cap: int, log: Log) -> BatchPlan:
    rows, group, longest = (
        recipe.train.batch_size,
        recipe.sequences_per_row,
        recipe.longest_sequence,
    )
    if group * longest > cap * trainer.cp:
        raise FitError(
            f"a row of {group * longest} tokens does not fit into a microbatch",
            why=f"data.max_row_tokens {longest}"
            + (" x 2, as a pair is never parted," if group == 2 else "")
            + f" > train.max_tokens_per_microbatch {cap} x cp {trainer.cp}",
            fix=f"--set train.max_tokens_per_microbatch={-(-group * longest // trainer.cp)}",
        )
    if rows < trainer.dp:
        raise FitError(
            f"{rows} rows a step are too few for {trainer.dp} data-parallel ranks",
            why=f"train.batch_size {rows} < dp {trainer.dp}",
            fix=f"--set train.batch_size={trainer.dp}",
        )
    log.note("batch", f"{rows} rows", f"at most {cap} tokens a microbatch and rank")
    return BatchPlan(
        prompts_per_step=rows,
        samples_per_prompt=group,
        num_samples=rows * group,
        updates_per_step=1,
        max_tokens_per_microbatch=cap,
        max_sequence_tokens=longest,
        of_rows=True,
    )
