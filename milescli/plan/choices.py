"""The choices of a plan besides its layout: the batch of a step, the precision, and how many tokens
the engines speculate. Each is logged with its reason. Pure; called by `make`."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from milescli.core.errors import FitError
from milescli.core.units import format_count
from milescli.models import table
from milescli.models.costs import groups_experts
from milescli.models.facts import ModelFacts
from milescli.plan.types import BatchPlan, Log, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe


def batch_plan(
    recipe: Recipe, facts: ModelFacts, trainer: TrainerLayout, cap: int, *, on_cpu: bool, log: Log
) -> BatchPlan:
    """Decide the batch arithmetic of a step. `cap` is the number of tokens of a microbatch on one
    rank. Raises FitError if a sequence exceeds it, or if a step has too few sequences for the
    ranks."""
    plan = _batch_of_rows if recipe.learns_from_rows else _batch_of_samples
    batch = plan(recipe, trainer, cap, log)
    shares = on_cpu and shares_prompts(recipe, facts, trainer, batch.samples_per_prompt)
    if shares:
        log.note(
            "batch.shares_prompts",
            "on",
            f"a prompt is computed once for its {batch.samples_per_prompt} sequences in a "
            "microbatch",
        )
    return replace(batch, shares_prompts=shares)


def _batch_of_samples(recipe: Recipe, trainer: TrainerLayout, cap: int, log: Log) -> BatchPlan:
    prompts, group = recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt
    longest = recipe.longest_sequence
    num_samples, updates = prompts * group, recipe.train.updates_per_step
    if longest > cap * trainer.cp:
        raise FitError(
            f"a sequence of {longest} tokens does not fit in a microbatch",
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
            f"a row of {group * longest} tokens does not fit in a microbatch",
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


def can_share_prompts(facts: ModelFacts) -> bool:
    """Return True if the model computes each position independently, except for attention to
    earlier positions, so that sequences can share a common prefix."""
    attends = all(layer.mixer in ("full", "sliding") for layer in facts.layers)
    more = facts.num_experts or facts.trains_mtp or facts.scores
    return attends and not more


_MIN_SHARED_HIDDEN = 256
"""Hidden size below which a layer's products cost little more than moving its keys and values."""


def shares_prompts(recipe: Recipe, facts: ModelFacts, trainer: TrainerLayout, group: int) -> bool:
    """Return True if a rank computes a prompt once for all sequences that begin with it. Under
    `exact`, and if ranks share a model, every sequence is computed whole."""
    whole = trainer.tp == trainer.pp == trainer.cp == 1 and recipe.train.on_policy != "exact"
    pays = group > 1 and facts.hidden_size >= _MIN_SHARED_HIDDEN
    return whole and pays and not recipe.train.lora.dropout and can_share_prompts(facts)


WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
"""Bytes of a weight."""


def choose_precision(recipe: Recipe, machine: Machine, log: Log) -> Literal["bf16", "fp32"]:
    """Return the precision that the recipe pins, or the device's default."""
    pinned = recipe.train.precision
    if pinned == "bf16" or pinned == "fp32":
        log.note("precision", pinned, "pinned by `train.precision`")
        return pinned
    on_cpu = machine.kind == "cpu" or recipe.machine.gpus == 0
    log.note(
        "precision",
        "fp32" if on_cpu else "bf16",
        "a CPU gains nothing from bf16" if on_cpu else "the accelerator's native format",
    )
    return "fp32" if on_cpu else "bf16"


SPECULATED_ON_CPU = {"ngram": 3, "draft": 3, "mtp": 1}
"""Speculated tokens by kind, on a CPU: a pass over four tokens of a request takes two to three
times as long as over one, so a wrong guess costs what a right one saves."""
SPECULATED_ON_DEVICES = {"ngram": 11, "draft": 3, "mtp": 3}
"""Speculated tokens by kind, on devices: SGLang's defaults, for MTP those of DeepSeek's. Reading
the weights bounds a pass, so extra tokens cost little."""


def num_speculated_tokens(recipe: Recipe, *, on_cpu: bool) -> tuple[int, str]:
    """Return (number of tokens that are speculated in each pass, the reason); (0, reason) without
    speculation."""
    settings = recipe.rollout.speculative
    if settings.kind == "none":
        return 0, "`rollout.speculative.kind` is none"
    if settings.guesses is not None:
        return settings.guesses, "pinned by `rollout.speculative.guesses`"
    if on_cpu:
        why = "few: a pass over several tokens takes longer on a CPU"
        return max(SPECULATED_ON_CPU[settings.kind], settings.ngram_breadth), why
    return max(SPECULATED_ON_DEVICES[settings.kind], settings.ngram_breadth), "SGLang's own default"


def note_speculation(recipe: Recipe, *, on_cpu: bool, log: Log) -> None:
    """Log how many tokens the engines speculate, and why. Does nothing without speculation."""
    number, why = num_speculated_tokens(recipe, on_cpu=on_cpu)
    if not number:
        return
    log.note("rollout.speculative.guesses", number, why)
    exact = (
        "the tokens of a seed are those without it"
        if on_cpu
        else "samples have the distribution that they have without it, but a seed gives other "
        "tokens; nothing of it was tried on a device"
    )
    log.note("rollout.speculative.kind", recipe.rollout.speculative.kind, exact)


def note_vision(facts: ModelFacts, log: Log) -> None:
    """Log the vision tower, and which of its weights are trained."""
    vision = facts.vision
    if vision is None:
        return
    lines = table(facts)
    trained = lines.without_frozen_tower().num_vision_parameters
    how = {
        "frozen": "computed once a step for each image, and never published",
        "projector": f"{format_count(trained)} are trained and published, those of the projector",
        "all": "trained and published",
    }[vision.trained]
    log.note(
        "model.vision",
        vision.trained,
        f"{format_count(lines.num_vision_parameters)} of {format_count(lines.num_parameters)} "
        f"numbers are the vision tower's, whole on every rank of the first stage; {how}",
    )


def note_indexer(facts: ModelFacts, log: Log) -> None:
    """Log the parameters of an indexer, if they are trained."""
    if facts.indexer is None or not facts.indexer.trained:
        return
    lines = table(facts)
    log.note(
        "model.indexer",
        "kl",
        f"{format_count(lines.num_indexer_parameters)} of {format_count(lines.num_parameters)} "
        f"numbers are those of {facts.num_indexers} indexers, whole on every rank of their stage; "
        "they learn from their own loss alone, and the rest of the model does not learn from it",
    )


def note_mtp(recipe: Recipe, facts: ModelFacts, log: Log) -> None:
    """Log what the MTP layer is used for. Does nothing if it is neither trained nor used for
    speculation."""
    if not facts.trains_mtp:
        if recipe.rollout.speculative.kind == "mtp":
            why = "the layer that guesses stays as it is while the policy learns"
            log.note("train.mtp.loss_weight", "off", why)
        return
    lines, through = table(facts), ""
    if recipe.train.mtp.trains_trunk:
        through = "; its loss trains the model below it, too"
    log.note(
        "train.mtp.loss_weight",
        recipe.train.mtp.loss_weight,
        f"{format_count(lines.num_mtp_parameters)} of {format_count(lines.num_parameters)} numbers "
        f"are the MTP layer's, on the last stage{through}",
    )


def note_experts(
    recipe: Recipe,
    facts: ModelFacts,
    trainer: TrainerLayout,
    *,
    fp32: bool,
    on_cpu: bool,
    log: Log,
) -> None:
    """Log whether the trainer multiplies by all experts of a rank at once, and why. Does nothing
    for a model without experts."""
    if not facts.num_experts:
        return
    width = facts.moe_latent_size or facts.hidden_size
    numbers = width * facts.moe_ffn_hidden_size * (1 + facts.gated_mlp) // trainer.etp
    dtype = "float32" if fp32 else "bfloat16"
    size = f"{numbers:,} numbers of an expert in {dtype} on {'a CPU' if on_cpu else 'a device'}"
    engine = "" if on_cpu else "by TransformerEngine where it is installed, else "
    loops = {
        "they have biases, which no grouped product adds": facts.mlp_bias,
        "`train.on_policy=exact` computes them as engines do": recipe.train.on_policy == "exact",
        f"{size}: a loop is faster": not groups_experts(
            numbers=numbers, dtype=dtype, on_cpu=on_cpu
        ),
    }
    if reason := next((reason for reason, holds in loops.items() if holds), None):
        log.note("experts", "loop", reason)
        return
    exception = (
        "; those beside which an adapter stands, in a loop" if recipe.train.lora.is_on else ""
    )
    log.note("experts", "grouped", f"{size}: {engine}by torch's grouped_mm{exception}")
