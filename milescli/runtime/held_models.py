"""Models that a run asks and does not train, before any process starts: a teacher, a reward model.
Found, fetched, or written out of a run's checkpoint, and held against the policy's tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.hub.models import fetch_config, fetch_model
from milescli.checkpoint.base import is_converted
from milescli.checkpoint.run_dir import CHECKPOINTS, RECIPE_FILE
from milescli.core.errors import RecipeError
from milescli.models import ModelFacts, load_facts, parse_facts
from milescli.models.base import CONFIG_NAME, read_config
from milescli.recipe.machine import RunSettings
from milescli.recipe.templates import shipped_shape
from milescli.rollout.tokenizer import RAW, ChatTokenizer, load_tokenizer

if TYPE_CHECKING:
    from milescli.console.output import Output
    from milescli.conversion.source import CheckpointSource

NUM_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModelPath:
    """Where such a model lies, as the recipe says it."""

    what: str
    """`teacher`, `reward model`."""
    key: str
    """Of the recipe."""
    path: str
    revision: str | None = None
    step: int | None = None
    """Of a run; None: its newest checkpoint."""

    def facts(self, longest: int) -> ModelFacts:
        """Without making or loading it. `longest`: tokens of a sequence that it will read. Raises
        RecipeError where it is not there, or has no positions for them; CheckpointError where it is
        no model."""
        facts = parse_facts(self.config())
        if 0 < facts.max_position_embeddings < longest:
            raise RecipeError(
                f"the {self.what} {self.path} cannot read the longest sequence",
                why=f"prompt and response may have {longest} tokens together, and it has "
                f"{facts.max_position_embeddings} positions",
                fix=f"name a {self.what} with more in {self.key}, or shorten prompts or responses",
            )
        return facts

    def config(self) -> dict[str, object]:
        """Its config.json, without making or loading it. Raises as `facts`."""
        folder = self._require()
        if is_checkpoint(folder):
            return read_config(checkpoint_of(folder, self.step).model_dir)
        if folder.is_dir():
            return read_config(folder)
        if self.revision in (None, "main") and (shape := shipped_shape(self.path)):
            return shape
        return read_config(fetch_config(self.path, revision=self.revision, instead=self._copy))

    def folder(self, target: Path, *, output: Output | None) -> Path:
        """The Hugging Face folder; a run's checkpoint is written to `target`, once: a run
        keeps what it asks, whatever the other one learns later."""
        folder = self._require()
        if is_checkpoint(folder):
            if not (target / CONFIG_NAME).exists():
                from milescli.conversion.unpack import unpack

                checkpoint = checkpoint_of(folder, self.step)
                model_dir = checkpoint.model_dir
                unpack(checkpoint.tensors, target, model_dir=model_dir, output=output)
            return target.absolute()
        if folder.is_dir():
            return folder.absolute()
        return fetch_model(self.path, revision=self.revision, output=output, instead=self._copy)

    def refuse_other_tokens(
        self, folder: Path, *, tokenizer: ChatTokenizer, least: int
    ) -> ChatTokenizer:
        """Its tokenizer. `tokenizer`: the policy's; `least`: tokens that its embedding must have.
        Raises RecipeError where both do not give each text the same ids, naming what differs."""
        theirs = load_tokenizer(folder, chat_template=RAW)
        difference, num_tokens = _difference(tokenizer, theirs), load_facts(folder).vocab_size
        if difference is None and num_tokens < least:
            difference = f"it knows {num_tokens:,} tokens, the policy {least:,}"
        if difference is not None:
            raise RecipeError(
                f"the {self.what} {self.path} has another tokenizer than the policy",
                why=f"{difference}; what it says of a token id would be about another text",
                fix=[
                    f"name a model of the policy's family in {self.key}",
                    f"--set model.scratch=null --set model.path={self.path}   # a policy with its "
                    "tokenizer",
                ],
            )
        return theirs

    @property
    def is_on_hub(self) -> bool:
        """It reads like a name there, and no folder of this disk could be meant."""
        folder = Path(self.path).expanduser()
        return not (folder.is_absolute() or self.path.count("/") != 1 or folder.parent.is_dir())

    @property
    def _copy(self) -> str:
        return f"name the folder of a copy in {self.key}"

    def _require(self) -> Path:
        """Names of the hub pass."""
        folder = Path(self.path).expanduser()
        if not folder.is_dir() and not self.is_on_hub:
            raise RecipeError(
                f"the {self.what} {self.path} is not there",
                why=f"`{self.key}` names a Hugging Face folder, a name on the hub, or the "
                "directory of a run",
                fix=[_command_that_makes(folder), f"name another in {self.key}"],
            )
        return folder


def _command_that_makes(folder: Path) -> str:
    """A run is called by its recipe and a number, unless it was given a name."""
    of_run = re.fullmatch(r"(.+)-\d+", folder.name)
    if folder.parent.name == RunSettings().dir and of_run:
        return f"miles launch --recipe {of_run[1]} --name {folder.name}"
    return f"miles export RUN --to {folder}"


def is_checkpoint(folder: Path) -> bool:
    """Whether it is a run, one of its checkpoints or a converted model: not yet a Hugging Face
    folder."""
    run = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
    return (run / RECIPE_FILE).is_file() or is_converted(folder)


def checkpoint_of(folder: Path, step: int | None = None) -> CheckpointSource:
    """Of such a folder; of a run the newest one, unless `step` is given. Raises CheckpointError."""
    from milescli.conversion.source import find_checkpoint  # imports torch

    return find_checkpoint(folder, model=None, step=step, model_option="--base")


def _difference(own: ChatTokenizer, theirs: ChatTokenizer) -> str | None:
    """None where both give each text the same ids, as far as their vocabularies say."""
    ours, other = own.inner.get_vocab(), theirs.inner.get_vocab()
    apart = sorted((token for token in ours if ours[token] != other.get(token)), key=ours.get)
    apart += sorted((token for token in other if token not in ours), key=other.get)
    if not apart:
        return None
    shown = ", ".join(
        f"{token!r} is {_named(ours.get(token))} for the policy, {_named(other.get(token))} there"
        for token in apart[:NUM_SHOWN]
    )
    return f"{len(apart):,} of {len(ours.keys() | other.keys()):,} tokens differ: {shown}"


def _named(number: int | None) -> str:
    return "missing" if number is None else f"id {number}"
