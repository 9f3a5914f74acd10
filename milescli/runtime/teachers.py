"""The teachers of a run, before any process starts. Called by `inputs` and `planning`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import RecipeError
from milescli.models import ModelFacts
from milescli.recipe.schema import Recipe
from milescli.rollout.tokenizer import ChatTokenizer
from milescli.runtime.held_models import HeldModelPath

if TYPE_CHECKING:
    from milescli.backends.sglang.teacher import ServedTeachers
    from milescli.console.output import Output


def teacher_paths(recipe: Recipe) -> list[HeldModelPath]:
    """Where each teacher lies that the trainer's ranks hold."""
    return [
        HeldModelPath(what="teacher", key="train.distill.teachers", path=teacher.path or "")
        for teacher in recipe.held_teachers
    ]


def teacher_facts(recipe: Recipe) -> list[ModelFacts]:
    """Of each such teacher, without making or loading it. Raises RecipeError for one that is not
    there, CheckpointError for one that is no model."""
    return [_facts(teacher, recipe.longest_sequence) for teacher in teacher_paths(recipe)]


def _facts(teacher: HeldModelPath, longest: int) -> ModelFacts:
    facts = teacher.facts(longest)
    if facts.scores:
        raise RecipeError(
            f"the teacher {teacher.path} gives a score instead of a next token",
            why="it is a reward model, and a teacher says how likely each token is",
            fix="name a model that writes",
        )
    facts.require_trainable()
    return facts


def teacher_folders(
    recipe: Recipe,
    run: RunDir,
    *,
    tokenizer: ChatTokenizer,
    facts: ModelFacts,
    output: Output | None,
) -> list[Path]:
    """The Hugging Face folder of each teacher that the trainer's ranks hold. `facts`, `tokenizer`:
    the policy's. Raises RecipeError where a teacher has another tokenizer."""
    settings, folders = recipe.train.distill, []
    if recipe.teachers and settings.kl != "sampled" and settings.top_k >= facts.vocab_size:
        raise RecipeError(
            f"`train.distill.top_k` cannot be {settings.top_k}",
            why=f"the policy has {facts.vocab_size:,} tokens, and others must be left beside them",
            fix=f"--set train.distill.top_k={min(32, facts.vocab_size - 1)}",
        )
    for number, teacher in enumerate(teacher_paths(recipe)):
        folder = teacher.folder(run.teacher_model_dir(number), output=output)
        theirs = teacher.refuse_other_tokens(folder, tokenizer=tokenizer, least=facts.vocab_size)
        if theirs.eos_id != tokenizer.eos_id and output is not None:
            ends = [each.inner.convert_ids_to_tokens(each.eos_id) for each in (theirs, tokenizer)]
            output.warn(f"the teacher {teacher.path} ends by {ends[0]}, the policy by {ends[1]}")
        folders.append(folder)
    return folders


def served_teachers(recipe: Recipe) -> ServedTeachers | None:
    """Those that are asked by HTTP; None: there are none. Raises RecipeError where the environment
    has no key."""
    if not recipe.train.distill.is_served:
        return None
    from milescli.backends.sglang.teacher import ServedTeachers

    return ServedTeachers(recipe)


def met_teachers(recipe: Recipe, tokenizer: ChatTokenizer, facts: ModelFacts) -> list[str]:
    """Of each served teacher its address and what is served there. `tokenizer`, `facts`: the
    policy's. Raises RecipeError where one has another tokenizer, EndpointError where it does not
    answer."""
    served = served_teachers(recipe)
    return [] if served is None else asyncio.run(served.meet(tokenizer, facts.vocab_size))
