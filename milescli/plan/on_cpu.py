"""Chooses layouts on a CPU: on each node one trainer rank and one engine, or two engines for a
small model, unless the recipe pins others. Called by `make`."""

from __future__ import annotations

from milescli.core.units import GIB, format_bytes
from milescli.models import table
from milescli.models.facts import ModelFacts
from milescli.plan.legal import engine_faults, faults, training_faults
from milescli.plan.placement import separate_engines_purpose
from milescli.plan.types import EngineLayout, Log, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe

DEFAULT_FRACTION = 0.7
"""SGLang's memory fraction without a pin; on a CPU the number of tokens bounds the cache."""
PREFILL_TOKENS = 2048
"""New tokens that an engine on a CPU computes at once; more would not fit into its processor's
caches."""
MIN_REQUESTS, MAX_REQUESTS = 8, 512
"""Bounds of the requests that an engine, or a group of its devices, runs at once, unless pinned."""
MIN_CACHE_TOKENS = 4096
"""Smallest cache of one engine, for any recipe."""
SMALL_WEIGHTS = GIB
"""Largest weights of a model for which two engines divide the cores: 1.1 to 1.8 times the tokens of
one engine with two threads, measured with models of 1 to 200 M parameters (docs/figures.md)."""
MIN_SAMPLES_PER_ENGINE = 32
"""Fewest samples of a step for each of two engines; an estimate."""
KV_SLOTS_PER_REQUEST = 1.25
"""Ratio of an engine's cache to the most that a step can hold at once."""


def trainer_on_cpu(recipe: Recipe, facts: ModelFacts, log: Log) -> TrainerLayout:
    """Return the trainer layout on a CPU: axes without a pin are 1, except that data parallelism
    uses all nodes. Raises FitError for an illegal pin."""
    pins = recipe.parallel
    across = -(-recipe.machine.nodes // ((pins.tp or 1) * (pins.pp or 1) * (pins.cp or 1)))
    layout = pinned_layout(recipe, facts, dp=across if across > 1 else None)
    for key in ("tp", "pp", "cp", "ep"):
        pinned = getattr(recipe.parallel, key) is not None
        log.note(
            f"trainer.{key}",
            getattr(layout, key),
            f"pinned by `parallel.{key}`" if pinned else "1 unless pinned",
        )
    ranks, parts = layout.world_size, layout.tp * layout.pp * layout.cp
    log.note(
        "trainer.dp",
        layout.dp,
        f"{ranks} ranks / (tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {parts})",
    )
    if layout.sequence_parallel:
        log.note(
            "trainer.sequence_parallel",
            True,
            "tp > 1: norms and residuals are split along the sequence, which saves memory",
        )
    return layout


def pinned_layout(recipe: Recipe, facts: ModelFacts, *, dp: int | None = None) -> TrainerLayout:
    """Return the layout of the pins; axes without a pin are 1, and data parallelism is as the
    experts need it unless `dp` or a pin says otherwise. Raises FitError if the layout is
    illegal."""
    pins = recipe.parallel
    tp, pp, cp, ep = pins.tp or 1, pins.pp or 1, pins.cp or 1, pins.ep or 1
    etp = pins.etp or (tp if ep == 1 or not facts.num_experts else 1)
    needed = -(-ep * etp // (tp * cp)) if facts.num_experts else 1
    layout = TrainerLayout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=pins.dp or dp or max(1, needed),
        sequence_parallel=tp > 1
        if pins.sequence_parallel is None
        else pins.sequence_parallel and tp > 1,
        first_stage_layers=pins.first_stage_layers,
        last_stage_layers=pins.last_stage_layers,
        recompute="full" if recipe.train.recompute == "full" else "none",
        offload_optimizer=bool(recipe.train.optimizer.offload),
    )
    for fault in (*faults(layout, facts), *training_faults(layout, facts)):
        raise fault.error()
    return layout


def why_not_two_engines(
    recipe: Recipe, machine: Machine, facts: ModelFacts, *, size: int, colocated: bool
) -> str | None:
    """Return the reason why two engines, with half of the cores each, are not possible; None if
    they are. For a small model the Python code between two matrix products takes as long as the
    products, and only a second process can overlap it. `size`: bytes of a weight."""
    num_samples = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    weights = table(facts).num_parameters * size
    reasons = {
        "pinned by `engines.num`": recipe.engines.num,
        "`engines.tp` is pinned": recipe.engines.tp,
        "`machine.cpu_threads` is pinned": recipe.machine.cpu_threads,
        "the trainer works at the same time": not colocated,
        "one for each node": recipe.machine.nodes > 1,
        "there is but one core": machine.nodes[0].cpu_cores < 2,
        f"{num_samples} samples a step are too few to share out": num_samples
        < 2 * MIN_SAMPLES_PER_ENGINE,
        f"two were tried with weights of {format_bytes(SMALL_WEIGHTS)} at most, and these are "
        f"{format_bytes(weights)}": weights > SMALL_WEIGHTS,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def engines_on_cpu(
    recipe: Recipe, facts: ModelFacts, log: Log, *, why_one: str | None
) -> EngineLayout:
    """Return the engine layout: two engines if `why_one` is None, else as pinned, or one per node.
    The cache holds all requests of a step; `main_memory` may shrink it."""
    pins = recipe.engines
    tp = pins.tp or 1
    for fault in engine_faults(facts, tp=tp, ep=pins.ep or 1, attention_dp=pins.attention_dp or 1):
        raise fault.error()
    apart = recipe.engines_apart
    num = pins.num or (max(1, recipe.machine.nodes // tp) if why_one else 2) + apart
    why = why_one or "a small model: two sample faster than one"
    log.note(
        "engines.num", num, why + f"; {apart} for {separate_engines_purpose(recipe)}" * bool(apart)
    )
    running, longest = max_running(recipe, num - apart, log), longest_tokens(recipe)
    return EngineLayout(
        num=num,
        tp=tp,
        ep=pins.ep or 1,
        attention_dp=pins.attention_dp or 1,
        max_running_requests=running,
        max_total_tokens=pins.max_total_tokens
        or max(MIN_CACHE_TOKENS, int(running * longest * KV_SLOTS_PER_REQUEST)),
        memory_fraction=pins.memory_fraction or DEFAULT_FRACTION,
        context_length=context_length(recipe, facts),
    )


def max_running(recipe: Recipe, num: int, log: Log) -> int:
    """Return the number of requests that an engine runs at once."""
    num_samples = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    pinned = recipe.engines.max_running_requests
    running = pinned or max(MIN_REQUESTS, min(MAX_REQUESTS, -(-num_samples // num)))
    many = f"{num_samples} samples a step over {num} engine{'s'[: num > 1]}, at most {MAX_REQUESTS}"
    log.note(
        "engines.max_running_requests",
        running,
        "pinned by `engines.max_running_requests`" if pinned else many,
    )
    return running


def longest_tokens(recipe: Recipe) -> int:
    """Return the tokens of the longest prompt plus response that an engine must hold."""
    longest_response = max(recipe.rollout.max_response_tokens, recipe.eval.max_response_tokens or 0)
    return recipe.data.max_prompt_tokens + longest_response


def context_length(recipe: Recipe, facts: ModelFacts) -> int:
    """Return the context length with which engines start. Lengths beyond the model's are refused
    elsewhere, by the check of the recipe."""
    longest = longest_tokens(recipe) + 16
    return min(facts.max_position_embeddings, longest) if facts.max_position_embeddings else longest
