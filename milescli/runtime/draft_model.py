"""The model that guesses tokens ahead for the engines (`rollout.speculative.model`), before any
process starts. Called by `inputs` and `planning`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import FitError, MachineError
from milescli.models import ModelFacts
from milescli.plan.legal import check_layout
from milescli.plan.on_cpu import longest_tokens
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.rollout.tokenizer import ChatTokenizer
from milescli.runtime.held_models import HeldModelPath

if TYPE_CHECKING:
    from milescli.console.output import Output


def draft_path(recipe: Recipe) -> HeldModelPath | None:
    """Where it lies; None: no model of its own guesses."""
    settings = recipe.rollout.speculative
    if settings.kind != "draft":
        return None
    assert settings.model is not None, "recipe.check lets no draft without a model pass"
    return HeldModelPath(
        what="draft model",
        key="rollout.speculative.model",
        path=settings.model,
        revision=settings.revision,
    )


def require_draft(recipe: Recipe) -> ModelFacts | None:
    """Its facts, without loading it. Raises RecipeError where it is not there, or cannot read the
    longest sequence; CheckpointError where it is no model."""
    path = draft_path(recipe)
    return None if path is None else path.facts(longest_tokens(recipe))


def require_learning_draft(plan: Plan, facts: ModelFacts) -> None:
    """Raises where a draft model with these facts cannot be trained beside the policy:
    MachineError, CheckpointError or FitError."""
    off = "--set train.draft.lr=null"
    if plan.device_kind != "cpu":
        raise MachineError(
            f"a draft model does not learn on {plan.device_kind}",
            why="the memory that it takes beside policy and engines is not planned for there",
            fix=off,
        )
    if plan.channel != "tensor":
        raise FitError(
            "what the draft model learns would not reach the engines",
            why=f"the channel is {plan.channel}, as they are on other devices than the trainer",
            fix=["--set engines.placement=colocated", off],
        )
    facts.require_trainable()
    try:
        check_layout(plan.trainer, facts)
    except FitError as error:
        raise FitError(
            "the draft model cannot be trained under the policy's layout",
            why=f"{error.what}: {error.why}",
            fix=off,
        ) from None


def draft_folder(
    recipe: Recipe,
    run: RunDir,
    *,
    tokenizer: ChatTokenizer,
    facts: ModelFacts,
    output: Output | None,
) -> Path | None:
    """Its Hugging Face folder. Raises as `require_draft`, and RecipeError where it reads other
    tokens than the policy, whose `facts` these are."""
    path = draft_path(recipe)
    if path is None:
        return None
    folder = path.folder(run.held_model_dir("draft-model", path.path), output=output)
    path.refuse_other_tokens(folder, tokenizer=tokenizer, least=facts.vocab_size)
    return folder


def without_speculation(recipe: Recipe) -> Recipe:
    """The same, one token a pass: for engines that load folders, which SGLang cannot while it
    guesses."""
    plain = recipe.rollout.speculative.model_copy(
        update={"kind": "none", "model": None, "revision": None}
    )
    return recipe.model_copy(
        update={"rollout": recipe.rollout.model_copy(update={"speculative": plain})}
    )
