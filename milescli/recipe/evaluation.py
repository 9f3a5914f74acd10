"""Defines the section `eval`: held-out prompts, and which model answers them. With its rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.recipe.requests import Requests
from milescli.recipe.section import NonNegative, NonNegativeFloat, Positive, Rule, Section

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe


class EndpointSettings(Requests):
    """Evaluation of a model behind an OpenAI-compatible endpoint, for `miles eval URL`."""

    model: str | None = None
    """Name of the model at the endpoint; null: the only one that it serves."""
    extra: list[str] = Field(default=[])
    """Additional fields of each request, as NAME=JSON: ['reasoning_effort="low"']. null removes a
    field: [max_tokens=null, max_completion_tokens=4096]."""


class Evaluation(Section):
    """Evaluation on `data.eval`."""

    every: NonNegative = 0
    """Number of steps between evaluations; 0: only at the start and at the end."""
    num_prompts: Positive | None = None
    """Evaluate only the first N held-out prompts; null: all."""
    samples_per_prompt: Positive = 1
    function: str = "all"
    """How to sample. all: `samples_per_prompt` responses to each prompt; or an import path."""
    metrics: str = "none"
    """Metrics in addition to the accuracy. none; pass_at_k: the probability that at least one of k
    samples is correct, for k = 1, 2, 4, ...; or an import path."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0: greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    max_response_tokens: Positive | None = None
    """Longest response in tokens; null: as in `rollout`."""
    engines: Literal["shared", "own"] = "shared"
    """Which engines run an evaluation during a run. shared: the rollout engines, between two steps,
    while the run waits; own: one engine of the plan is reserved and evaluates the weights of the
    step while the run continues."""
    endpoint: EndpointSettings = EndpointSettings()


def rules(recipe: Recipe, origins: Mapping[str, object]) -> Iterator[Rule]:
    """Yield the rules for engines that sample nothing to train on."""
    if not recipe.engines_apart:
        return
    is_own, num = recipe.eval.engines == "own", recipe.engines.num
    fix = ["--set eval.engines=shared"] if is_own else []
    users = ["`eval.engines` own keeps one for evaluations"] if is_own else []
    users += [f"{name} plays roles on one of its own" for name in recipe.rollout.policies]
    yield Rule(
        recipe.learns_from_rows,
        "evaluations cannot have their own engines in this run"
        if is_own
        else "roles cannot have their own models in this run",
        why="a run that learns from rows uses its engines only for evaluations",
        fix=fix or "remove `policy` from `rollout.roles`",
    )
    yield Rule(
        num is not None and num <= recipe.engines_apart,
        "no engine would be left for sampling",
        why=f"`engines.num` is {num} ({origins['engines.num']}), and {', '.join(users)}",
        fix=[f"--set engines.num={recipe.engines_apart + 1}", *fix],
    )
