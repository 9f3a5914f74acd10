"""The dry run's check of data, tokenizer and reward: finds within seconds, in a process of its own,
what a launch would refuse after reading them. All rows are read, and some are tokenised; nothing is
downloaded, nothing is left behind. Called by `dry_run`."""

from __future__ import annotations

import concurrent.futures
import tempfile
from collections.abc import Iterator
from pathlib import Path

from milescli.agents.tool_kit import offered
from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import MilesError
from milescli.data.images import ANY_MODEL_IMAGES
from milescli.data.prompt_encoder import TokenlessEncoder
from milescli.data.tokenizer import ChatTokenizer, load_tokenizer
from milescli.models import ModelFacts
from milescli.recipe.schema import Recipe
from milescli.runtime.inputs.checks import (
    INPUTS,
    OTHER_MODELS,
    Check,
    NotMade,
    Outcome,
    Subject,
    outcomes,
)
from milescli.runtime.inputs.data_files import with_local_files
from milescli.runtime.inputs.given_models import checkpoint_of, is_checkpoint
from milescli.runtime.inputs.run_data import load_data, why_unread
from milescli.runtime.inputs.run_inputs import require_parts_of_episodes, stop_ids_of_turns
from milescli.workers.worker import UserWorker

BOUND_S = 120.0
"""Time for the process to read the data, besides the time of a reward."""
NUM_TOKENISED = 512
"""Number of rows of a file that are tokenised; all are read."""


class Look:
    """A process that checks the inputs of one recipe; it starts at once."""

    def __init__(self, recipe: Recipe, facts: ModelFacts) -> None:
        """`facts`: of the recipe's model."""
        self._recipe = recipe
        self._worker = UserWorker(f"{__name__}:look")
        _, self._reply = self._worker.call(recipe, facts)

    def outcomes(self) -> list[Outcome]:
        """Wait for the outcomes. A check that takes too long counts as not made."""
        bound_s = BOUND_S + 2 * self._recipe.rollout.reward_timeout_s
        try:
            if not concurrent.futures.wait([self._reply], timeout=bound_s).done:
                why = f"the dry run waited {bound_s:g} s for the data"
                return [_unmade(check, why) for check in INPUTS]
            return self._reply.result()
        finally:
            self.close()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._worker.close()


def look(recipe: Recipe, facts: ModelFacts) -> list[Outcome]:
    """Make all checks whose inputs are on this machine. `Look` calls it in its process."""
    with tempfile.TemporaryDirectory(prefix="miles-look-") as folder:
        return list(_looked(recipe, facts, RunDir(path=Path(folder))))


def _looked(recipe: Recipe, facts: ModelFacts, run: RunDir) -> Iterator[Outcome]:
    """Yield the outcomes. Imports the user's plug-ins first: their imports must find torch."""
    episodes = list(outcomes(OF_EPISODES, Subject(recipe=recipe)))
    yield from episodes
    if any(one.refusal is not None for one in episodes):
        return
    missing: dict[str, str] = {}
    tokenizer, refused = None, None
    try:
        tokenizer = _tokenizer(recipe, missing)
    except MilesError as error:
        refused = error
        missing["tokenizer"] = "it was rejected"
    yield Outcome(
        name="tokenizer",
        compares="the files of the tokenizer with what a run needs",
        refusal=refused,
        not_checked="" if refused else missing.get("tokenizer", ""),
    )
    if tokenizer is not None:
        tokenizer.num_embeddings = facts.vocab_size
    subject, outcome = _subject(recipe, facts, tokenizer, missing, run)
    yield outcome
    yield from outcomes([OTHER_MODELS, *INPUTS], subject)
    if subject.heldout is not None:
        yield Outcome(
            name="near leaks",
            compares="held-out prompts with training prompts that are nearly the same",
            not_checked="it takes long; use `miles data check` for it",
        )


def _subject(
    recipe: Recipe,
    facts: ModelFacts,
    tokenizer: ChatTokenizer | None,
    missing: dict[str, str],
    run: RunDir,
) -> tuple[Subject, Outcome]:
    """Read the data. Return what the checks compare, and whether rows and columns are valid."""
    own = Outcome(name="rows", compares="columns and rows of the data with what the recipe reads")
    subject = Subject(recipe=recipe, facts=facts, tokenizer=tokenizer, missing=missing)
    if why := why_unread(recipe.data):
        missing["prompts"] = missing["rows"] = why
        return subject, _unmade(own, why)
    try:
        data = with_local_files(recipe.data, run, recipe.run.seed, output=None)
        unknown = TokenlessEncoder(images=ANY_MODEL_IMAGES if facts.vision is not None else None)
        loaded = load_data(
            recipe, data, run, tokenizer or unknown, output=None, large_rows=NUM_TOKENISED
        )
    except MilesError as error:
        missing["prompts"] = missing["rows"] = "rows were rejected"
        return subject, Outcome(name=own.name, compares=own.compares, refusal=error)
    if data.train is not None and tokenizer is None:
        own = _unmade(own, missing["tokenizer"])
        missing["rows"] = missing["tokenizer"]
    return Subject(
        recipe=recipe,
        facts=facts,
        tokenizer=tokenizer,
        own_stop_ids=stop_ids_of_turns(tokenizer, tokenizer.folder) if tokenizer else (),
        trained=loaded.trained,
        heldout=loaded.heldout,
        rows=loaded.rows.items if loaded.rows is not None else (),
        missing=missing,
    ), own


def _tokenizer(recipe: Recipe, missing: dict[str, str]) -> ChatTokenizer | None:
    """Return the tokenizer if it is on this machine; else write the reason into `missing`."""
    model = recipe.model
    if model.scratch is not None:
        missing["tokenizer"] = "it is generated from the data at the launch"
        return None
    folder = Path(model.path or "").expanduser()
    if not folder.is_dir():
        missing["tokenizer"] = (
            f"that of {model.path} is on the hub; `miles data check` downloads it"
        )
        return None
    if is_checkpoint(folder):
        folder = checkpoint_of(folder).model_dir
    tools = () if recipe.rollout.mcp else offered(recipe.rollout)
    return load_tokenizer(folder, chat_template=recipe.data.chat_template, tools=tools)


def _unmade(check: Check | Outcome, why: str) -> Outcome:
    return Outcome(name=check.name, compares=check.compares, not_checked=why)


def _episodes(subject: Subject) -> None:
    require_parts_of_episodes(subject.recipe)


def _tools(subject: Subject) -> None:
    if subject.recipe.rollout.mcp:
        raise NotMade("use `miles doctor --recipe` to start the servers of tools")
    offered(subject.recipe.rollout)


OF_EPISODES = (
    Check(
        name="episodes",
        compares="agent, environment and rewards with the packages and settings that they need",
        run=_episodes,
    ),
    Check(
        name="tools",
        compares="the tools that are offered with their types and docstrings",
        run=_tools,
    ),
)
