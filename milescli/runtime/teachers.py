"""The teachers of a run, before any process starts: found or fetched, a run's checkpoint written
out, and held against the policy, whose tokens they must know. Called by `inputs` and `planning`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.hub.models import fetch_config, fetch_model
from milescli.checkpoint.base import is_converted
from milescli.checkpoint.run_dir import RECIPE_FILE, RunDir
from milescli.core.errors import RecipeError
from milescli.models import ModelFacts, load_facts, parse_facts
from milescli.models.base import CONFIG_NAME
from milescli.recipe.schema import Recipe, RunSettings
from milescli.recipe.templates import shipped_shape
from milescli.recipe.train import Teacher
from milescli.rollout.tokenizer import RAW, ChatTokenizer, load_tokenizer

if TYPE_CHECKING:
    from milescli.console.output import Output
    from milescli.conversion.source import CheckpointSource

NUM_SHOWN = 3


def teacher_facts(recipe: Recipe) -> list[ModelFacts]:
    """Of each teacher, without making or loading it. Raises RecipeError for one that is not there,
    CheckpointError for one that is no model."""
    return [_facts(teacher) for teacher in recipe.teachers]


def _facts(teacher: Teacher) -> ModelFacts:
    folder = _require(teacher)
    if _is_checkpoint(folder):
        facts = load_facts(_checkpoint_of(folder).model_dir)
    elif folder.is_dir():
        facts = load_facts(folder)
    elif shape := shipped_shape(teacher.path):
        facts = parse_facts(shape)
    else:
        facts = load_facts(fetch_config(teacher.path, revision=None))
    if facts.scores:
        raise RecipeError(
            f"the teacher {teacher.path} gives a score instead of a next token",
            why="it is a reward model, and a teacher says how likely each token is",
            fix="name a model that writes",
        )
    facts.require_trainable()
    return facts


def _require(teacher: Teacher) -> Path:
    """Raises RecipeError for a path that is not there; names of the hub pass."""
    folder = Path(teacher.path).expanduser()
    looks_local = folder.is_absolute() or teacher.path.count("/") != 1 or folder.parent.is_dir()
    if not folder.is_dir() and looks_local:
        raise RecipeError(
            f"the teacher {teacher.path} is not there",
            why="`train.distill.teachers` names a Hugging Face folder, a name on the hub, or the "
            "directory of a run",
            fix=[
                _command_that_makes(folder),
                "--set 'train.distill.teachers=[{path: FOLDER}]'",
            ],
        )
    return folder


def _command_that_makes(folder: Path) -> str:
    """A run is called by its recipe and a number, unless it was given a name."""
    of_run = re.fullmatch(r"(.+)-\d+", folder.name)
    if folder.parent.name == RunSettings().dir and of_run:
        return f"miles launch --recipe {of_run[1]} --name {folder.name}"
    return f"miles export RUN --to {folder}"


def _is_checkpoint(folder: Path) -> bool:
    return (folder / RECIPE_FILE).is_file() or is_converted(folder)


def _checkpoint_of(folder: Path) -> CheckpointSource:
    from milescli.conversion.source import find_checkpoint  # imports torch

    return find_checkpoint(folder, model=None, step=None, model_option="--base")


def teacher_folders(
    recipe: Recipe,
    run: RunDir,
    *,
    tokenizer: ChatTokenizer,
    facts: ModelFacts,
    output: Output | None,
) -> list[Path]:
    """The Hugging Face folder of each teacher; a run's newest checkpoint is written into this run's
    directory, once. `facts`, `tokenizer`: the policy's. Raises RecipeError where a teacher has
    another tokenizer, naming what differs."""
    settings, folders = recipe.train.distill, []
    if recipe.teachers and settings.kl != "sampled" and settings.top_k >= facts.vocab_size:
        raise RecipeError(
            f"`train.distill.top_k` cannot be {settings.top_k}",
            why=f"the policy has {facts.vocab_size:,} tokens, and others must be left beside them",
            fix=f"--set train.distill.top_k={min(32, facts.vocab_size - 1)}",
        )
    for number, teacher in enumerate(recipe.teachers):
        folder = _require(teacher)
        if _is_checkpoint(folder):
            folder = _written_out(folder, run.teacher_model_dir(number))
        elif not folder.is_dir():
            folder = fetch_model(teacher.path, revision=None, output=output)
        theirs = load_tokenizer(folder, chat_template=RAW)
        _compare(teacher, load_facts(folder), theirs, tokenizer=tokenizer, facts=facts)
        if theirs.eos_id != tokenizer.eos_id and output is not None:
            ends = [each.inner.convert_ids_to_tokens(each.eos_id) for each in (theirs, tokenizer)]
            output.warn(f"the teacher {teacher.path} ends by {ends[0]}, the policy by {ends[1]}")
        folders.append(folder.absolute())
    return folders


def _written_out(folder: Path, target: Path) -> Path:
    if not (target / CONFIG_NAME).exists():
        from milescli.conversion.unpack import unpack

        checkpoint = _checkpoint_of(folder)
        unpack(checkpoint.tensors, target, model_dir=checkpoint.model_dir)
    return target


def _compare(
    teacher: Teacher,
    their_facts: ModelFacts,
    theirs: ChatTokenizer,
    *,
    tokenizer: ChatTokenizer,
    facts: ModelFacts,
) -> None:
    difference = _difference(tokenizer, theirs)
    num_tokens = their_facts.vocab_size
    if difference is None and num_tokens < facts.vocab_size:
        difference = (
            f"its output layer has {num_tokens:,} tokens, the policy's {facts.vocab_size:,}"
        )
    if difference is not None:
        raise RecipeError(
            f"the teacher {teacher.path} has another tokenizer than the policy",
            why=f"{difference}; what it says of a token id would be about another text",
            fix=[
                "name a teacher of the policy's family in train.distill.teachers",
                f"--set model.scratch=null --set model.path={teacher.path}   # a policy with its "
                "tokenizer",
            ],
        )


def _difference(own: ChatTokenizer, theirs: ChatTokenizer) -> str | None:
    """None where both give each text the same ids, as far as their vocabularies say."""
    ours, other = own.inner.get_vocab(), theirs.inner.get_vocab()
    apart = sorted((token for token in ours if ours[token] != other.get(token)), key=ours.get)
    apart += sorted((token for token in other if token not in ours), key=other.get)
    if apart:
        shown = ", ".join(
            f"{token!r} is {_named(ours.get(token))} for the policy, "
            f"{_named(other.get(token))} for the teacher"
            for token in apart[:NUM_SHOWN]
        )
        return f"{len(apart):,} of {len(ours.keys() | other.keys()):,} tokens differ: {shown}"
    return None


def _named(number: int | None) -> str:
    return "missing" if number is None else f"id {number}"
