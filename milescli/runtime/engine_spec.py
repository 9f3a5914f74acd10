"""What an engine of a run is: from recipe and plan to the spec of a server. Pure; `build` adds
where it lives."""

from __future__ import annotations

from pathlib import Path

from milescli.backends.sglang.spec import EngineSpec
from milescli.backends.sglang.speculation import Speculation
from milescli.models.adapter import SOLE_ADAPTER
from milescli.plan.choices import guesses
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe


def engine_spec(
    recipe: Recipe,
    plan: Plan,
    *,
    index: int,
    port: int,
    model_dir: Path,
    log_dir: Path,
    draft_dir: Path | None = None,
    adapter_dir: Path | None = None,
) -> EngineSpec:
    """What is equal on all nodes of engine `index`. `draft_dir`: of the model that guesses ahead,
    where it is there; `adapter_dir`: that it begins with, where the policy is an adapter."""
    layout, kept = plan.engines, recipe.engines.prefix_cache
    if kept is None and recipe.rollout.agent != "single_turn":
        kept = True
    return EngineSpec(
        name=f"engine {index}",
        model_dir=model_dir,
        tokenizer_dir=model_dir if recipe.rollout.stop else None,
        device_kind=plan.device_kind,
        precision=plan.precision,
        tp=layout.tp,
        ep=layout.ep,
        attention_dp=layout.attention_dp,
        port=port,
        log_path=log_dir / f"engine-{index}-server.log",
        max_running_requests=layout.max_running_requests,
        max_total_tokens=layout.max_total_tokens,
        memory_fraction=layout.memory_fraction,
        context_length=layout.context_length,
        cpu_threads=layout.cpu_threads or plan.cpu_threads,
        seed=recipe.run.seed,
        prefix_cache=kept,
        return_routed_experts=recipe.train.routing_replay,
        speculation=speculation_of(recipe, plan, draft_dir),
        adapter_dir=adapter_dir,
        adapter_names=tuple(recipe.adapters) or (SOLE_ADAPTER,),
        shares_outer=adapter_dir is not None and recipe.train.lora.experts == "shared_outer",
        attention_backend=recipe.engines.attention_backend,
        cuda_graphs=recipe.engines.cuda_graphs,
        extra_args=tuple(recipe.engines.extra),
    )


def speculation_of(recipe: Recipe, plan: Plan, draft_dir: Path | None = None) -> Speculation | None:
    """How the policy's engines guess ahead; None: they do not. `draft_dir`: see `engine_spec`."""
    settings = recipe.rollout.speculative
    if settings.kind == "none":
        return None
    return Speculation(
        kind=settings.kind,
        num_guesses=guesses(recipe, on_cpu=plan.device_kind == "cpu")[0],
        draft_dir=draft_dir,
        ngram_breadth=settings.ngram_breadth,
        ngram_length=settings.ngram_length,
    )
