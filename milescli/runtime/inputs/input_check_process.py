"""Checks the data, tokenizer and reward of a dry run: finds within seconds, in a process of its
own, the errors with which a launch would refuse them. All rows are read, and some are tokenised;
nothing is downloaded, and no file remains. Called by `dry_run`."""

from __future__ import annotations

import concurrent.futures
import tempfile
from collections.abc import Iterator
from pathlib import Path

from milescli.agents.tool_kit import offered_tools
from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import MilesError
from milescli.data.images import ANY_MODEL_IMAGES
from milescli.data.prompt_encoder import TokenlessEncoder
from milescli.data.tokenizer import ChatTokenizer, load_tokenizer
from milescli.models import ModelFacts
from milescli.recipe.schema import Recipe
from milescli.runtime.inputs.auxiliary_models import checkpoint_of, is_checkpoint
from milescli.runtime.inputs.checks import (
    INPUTS,
    OTHER_MODELS,
    Check,
    CheckSkipped,
    CheckSubject,
    Outcome,
    run_checks,
)
from milescli.runtime.inputs.data_files import with_local_files
from milescli.runtime.inputs.run_data import load_data, why_unread
from milescli.runtime.inputs.run_inputs import require_episode_parts, stop_ids_of_turns
from milescli.workers.worker import UserWorker

TIMEOUT_S = 120.0
"""Seconds for the process to read the data, in addition to the time of a reward."""
NUM_TOKENISED = 512
"""Number of rows of a file that are tokenised; all are read."""


class InputCheckProcess:
    """Checks the inputs of one recipe in a process, which starts at once."""

    def __init__(self, recipe: Recipe, facts: ModelFacts) -> None:
        """Start the process. `facts`: of the recipe's model."""
        self._recipe = recipe
        self._worker = UserWorker(f"{__name__}:check_inputs")
        _, self._reply = self._worker.call(recipe, facts)

    def outcomes(self) -> list[Outcome]:
        """Wait for the outcomes, and return them. A check that takes too long counts as skipped."""
        bound_s = TIMEOUT_S + 2 * self._recipe.rollout.reward_timeout_s
        try:
            if not concurrent.futures.wait([self._reply], timeout=bound_s).done:
                why = f"the dry run waited {bound_s:g} s for the data"
                return [_skipped(check, why) for check in INPUTS]
            return self._reply.result()
        finally:
            self.close()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._worker.close()


def check_inputs(recipe: Recipe, facts: ModelFacts) -> list[Outcome]:
    """Return the outcomes of all checks whose inputs are on this machine. `InputCheckProcess` calls
    it in its process."""
    with tempfile.TemporaryDirectory(prefix="miles-look-") as folder:
        return list(_check_outcomes(recipe, facts, RunDir(path=Path(folder))))


def _check_outcomes(recipe: Recipe, facts: ModelFacts, run: RunDir) -> Iterator[Outcome]:
    """Yield the outcomes. Imports the user's plug-ins first: their imports must find torch."""
    episodes = list(run_checks(OF_EPISODES, CheckSubject(recipe=recipe)))
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
    subject, outcome = _check_subject(recipe, facts, tokenizer, missing, run)
    yield outcome
    yield from run_checks([OTHER_MODELS, *INPUTS], subject)
    if subject.heldout is not None:
        yield Outcome(
            name="near leaks",
            compares="held-out prompts with training prompts that are nearly the same",
            not_checked="it takes long; use `miles data check` for it",
        )


def _check_subject(
    recipe: Recipe,
    facts: ModelFacts,
    tokenizer: ChatTokenizer | None,
    missing: dict[str, str],
    run: RunDir,
) -> tuple[CheckSubject, Outcome]:
    """Read the data. Return the inputs of the checks, and the outcome that says whether rows and
    columns are valid."""
    own = Outcome(name="rows", compares="columns and rows of the data with what the recipe reads")
    subject = CheckSubject(recipe=recipe, facts=facts, tokenizer=tokenizer, missing=missing)
    if why := why_unread(recipe.data):
        missing["prompts"] = missing["rows"] = why
        return subject, _skipped(own, why)
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
        own = _skipped(own, missing["tokenizer"])
        missing["rows"] = missing["tokenizer"]
    return CheckSubject(
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
    tools = () if recipe.rollout.mcp else offered_tools(recipe.rollout)
    return load_tokenizer(folder, chat_template=recipe.data.chat_template, tools=tools)


def _skipped(check: Check | Outcome, why: str) -> Outcome:
    return Outcome(name=check.name, compares=check.compares, not_checked=why)


def _episodes(subject: CheckSubject) -> None:
    require_episode_parts(subject.recipe)


def _tools(subject: CheckSubject) -> None:
    if subject.recipe.rollout.mcp:
        raise CheckSkipped("use `miles doctor --recipe` to start the servers of tools")
    offered_tools(subject.recipe.rollout)


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
