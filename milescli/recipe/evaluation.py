"""The recipe's section `eval`: held-out prompts, who is asked them, and the rules of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.recipe.requests import Requests
from milescli.recipe.section import NonNegative, NonNegativeFloat, Positive, Rule, Section

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe


class EndpointSettings(Requests):
    """Of a model behind an OpenAI-compatible endpoint, for `miles eval URL`."""

    model: str | None = None
    """As the endpoint calls it; null: the only one that it has."""
    extra: list[str] = Field(default=[])
    """Further fields of each request, as NAME=JSON: ['reasoning_effort="low"']. null leaves one
    out: [max_tokens=null, max_completion_tokens=4096]."""


class Evaluation(Section):
    """Evaluation on `data.eval`."""

    every: NonNegative = 0
    """Steps between evaluations; 0: only at the start and the end."""
    num_prompts: Positive | None = None
    """Only the first N held-out prompts; null: all."""
    samples_per_prompt: Positive = 1
    function: str = "all"
    """Which samples are taken. all: `samples_per_prompt` of each prompt; or an import path."""
    metrics: str = "none"
    """Figures beside the accuracy. none; pass_at_k: the chance that one of k samples is right, for
    k = 1, 2, 4, ...; or an import path."""
    temperature: NonNegativeFloat = 0.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    max_response_tokens: Positive | None = None
    """null: as in `rollout`."""
    engines: Literal["shared", "own"] = "shared"
    """Who answers in a run. shared: the engines of rollout, between two steps, while the run waits;
    own: one of the plan's engines is kept for it, with the weights of the step, while the run goes
    on."""
    endpoint: EndpointSettings = EndpointSettings()


def rules(recipe: Recipe, origins: Mapping[str, object]) -> Iterator[Rule]:
    """Yield the rules for engines that sample nothing to learn from."""
    if not recipe.engines_apart:
        return
    is_own, num = recipe.eval.engines == "own", recipe.engines.num
    fix = ["--set eval.engines=shared"] if is_own else []
    users = ["`eval.engines` own keeps one for evaluations"] if is_own else []
    users += [f"{name} plays roles on one of its own" for name in recipe.rollout.policies]
    yield Rule(
        recipe.learns_from_rows,
        "evaluations cannot have engines of their own here"
        if is_own
        else "no role can be played by a model of its own here",
        why="a run that learns from rows has engines for nothing else than evaluations",
        fix=fix or "take `policy` out of `rollout.roles`",
    )
    yield Rule(
        num is not None and num <= recipe.engines_apart,
        "no engine would be left to sample",
        why=f"`engines.num` is {num} ({origins['engines.num']}), and {', '.join(users)}",
        fix=[f"--set engines.num={recipe.engines_apart + 1}", *fix],
    )
