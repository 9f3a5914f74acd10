"""Decides whether engines and trainer compute log-probs with identical bits, `train.on_policy`, and
refuses settings that were not shown to be exact; `platform.exact` makes a CPU compute so. Pure;
called by `make`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from milescli.models.facts import ModelFacts
from milescli.plan.precision import Formats
from milescli.plan.types import EngineLayout, Log, TrainerLayout
from milescli.recipe.schema import Recipe
from milescli.recipe.section import Rule, refuse

EXACT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Families whose difference between engine and trainer is 0.0 on a CPU
(tests/backends/sglang/test_exact.py)."""
HEAD_UNIT = 8
"""The kernel that sums each query separately needs a head size that is a multiple of this."""
_OFF = "--set train.on_policy=auto"


def choose_on_policy(
    recipe: Recipe,
    facts: ModelFacts,
    *,
    trainer: TrainerLayout,
    engines: EngineLayout,
    formats: Formats,
    rounds_inputs: bool,
    on_cpu: bool,
    log: Log,
) -> Literal["auto", "exact"]:
    """Return the plan's `on_policy`, and log the reason if it is exact. Raises RecipeError if the
    recipe asks for `exact` with settings that are not exact, or were not shown to be."""
    if recipe.train.on_policy == "auto":
        return "auto"
    refuse(_setting_rules(recipe, trainer, engines, formats))
    if on_cpu:
        refuse(_proof_rules(facts, trainer, engines))
        refuse(_rounding_rules(formats, rounds_inputs))
    log.note(
        "train.on_policy",
        "exact",
        "each row of a product and each query is computed by itself on both sides; the check "
        "before the first step, and every step, ask for a difference of 0.0"
        if on_cpu
        else "unverified: no accelerator was tried. SGLang's deterministic mode and Megatron's "
        "batch-invariant kernels; the check before the first step asks for a difference of 0.0",
    )
    return "exact"


def _setting_rules(
    recipe: Recipe, trainer: TrainerLayout, engines: EngineLayout, formats: Formats
) -> Iterator[Rule]:
    """Yield the rules against settings that make engine and trainer compute different policies, or
    the same one in another order of summation, on any device."""
    kind, stale = recipe.rollout.speculative.kind, recipe.rollout.max_staleness
    yield _rule_against(
        recipe.learns_from_rows,
        "a run that learns from rows",
        "no engine samples what is learned from, so there is nothing to be equal to",
        _OFF,
    )
    yield _rule_against(
        stale,
        f"`rollout.max_staleness={stale}`",
        "samples come from weights of steps before, whose log-probs are others",
        "--set rollout.max_staleness=0",
    )
    yield _rule_against(
        kind != "none",
        f"`rollout.speculative.kind={kind}`",
        "guesses are verified several at once, by sums of another order",
        "--set rollout.speculative.kind=none",
    )
    yield _rule_against(
        recipe.train.lora.is_on,
        "an adapter",
        "the engine multiplies by the adapter in another order than the trainer",
        "--set train.lora.rank=null",
    )
    yield _rule_against(
        recipe.weights.format != "hf",
        f"`weights.format={recipe.weights.format}`",
        "engines hold other numbers than the trainer",
        "--set weights.format=hf",
    )
    yield _rule_against(
        formats.engines not in (None, formats.trainer),
        f"`rollout.precision={recipe.rollout.precision}`",
        "engines hold other numbers than the trainer",
        "--set rollout.precision=same",
    )
    yield _rule_against(
        trainer.tp != engines.tp,
        f"tp {trainer.tp} of the trainer beside tp {engines.tp} of the engines",
        "row-parallel layers add a sum for each rank of tp, and other parts round otherwise",
        f"--set parallel.tp={engines.tp}",
        f"--set engines.tp={trainer.tp}",
    )


def _proof_rules(
    facts: ModelFacts,
    trainer: TrainerLayout,
    engines: EngineLayout,
) -> Iterator[Rule]:
    """Yield the rules against layouts and models that were not shown to be exact on a CPU."""
    layouts = {"parallel": (trainer, "tp", "cp"), "engines": (engines, "tp", "ep", "attention_dp")}
    for section, (layout, *axes) in layouts.items():
        for axis in axes:
            yield _rule_against(
                (size := getattr(layout, axis)) > 1,
                f"`{section}.{axis}={size}`",
                "it was not shown to be exact: sums over ranks have an order of their own",
                f"--set {section}.{axis}=1",
            )
    odd = next((layer.mixer for layer in facts.layers if layer.mixer != "full"), None)
    reasons = {
        f"only {', '.join(EXACT_FAMILIES)} were shown to be exact": facts.family
        not in EXACT_FAMILIES,
        f"layers of kind `{odd}` were not shown to be exact": odd,
        f"heads of {facts.head_dim} numbers, and the kernel takes multiples of {HEAD_UNIT}": (
            facts.head_dim % HEAD_UNIT
        ),
        "biases of MLPs, or behind attention, were not shown to be exact": (
            facts.mlp_bias or facts.attention_output_bias
        ),
        f"the activation `{facts.activation}` was not shown to be exact": facts.activation
        != "silu",
    }
    for why, broken in reasons.items():
        yield _rule_against(broken, f"this `{facts.family}` model", why, _OFF)


def _rounding_rules(formats: Formats, rounds_inputs: bool) -> Iterator[Rule]:
    """Yield the rules against formats that round inputs differently in engine and trainer on a
    CPU."""
    yield _rule_against(
        rounds_inputs and formats.engines is None,
        "rounded inputs beside engines with plain weights",
        "engines round the inputs of quantised layers alone",
        "--set rollout.precision=same",
        "--set train.quantise_inputs=false",
    )
    yield _rule_against(
        rounds_inputs and formats.trainer == "nvfp4",
        "rounded NVFP4 inputs",
        "all tokens that are computed together share a scale, so a token depends on the others",
        "--set train.quantise_inputs=false",
    )


def _rule_against(broken: object, what: str, why: str, *fixes: str) -> Rule:
    return Rule(
        broken,
        f"`train.on_policy=exact` is not possible with {what}",
        why=why,
        fix=list(dict.fromkeys([*fixes, _OFF])),
    )
