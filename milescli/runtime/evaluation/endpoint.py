"""Implements `miles eval URL`: evaluates a model behind an OpenAI-compatible endpoint. No device is
used, and no process is started."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import DataError, RecipeError
from milescli.data.prompt_encoder import TokenlessEncoder
from milescli.recipe.requests import unencrypted_key_warning
from milescli.recipe.schema import Recipe, Rollout
from milescli.rollout.endpoint import base_url
from milescli.rollout.evaluation.endpoint_episodes import (
    SECTION,
    EndpointEpisodes,
    ReplyCache,
    endpoint_of,
    extra_fields,
    served_model,
)
from milescli.runtime.evaluation.evaluator import measure_set
from milescli.runtime.evaluation.results import SetResult, folder_of_endpoint
from milescli.runtime.evaluation.sets import EvalOptions, LoadedSet, load_set, sets_of_model
from milescli.runtime.inputs.episode_parts import scorer_of


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Provides the inputs for reading an endpoint's prompts: no tokenizer, and no rows that were
    trained on."""

    tokenizer: TokenlessEncoder
    prompts: None = None


def evaluate_endpoint(
    url: str,
    *,
    folder: Path | None,
    runs: Path,
    eval_options: EvalOptions,
    environ: Mapping[str, str],
    output: Output,
) -> tuple[Path, list[SetResult]]:
    """Evaluate each set with the model at `url`, an endpoint up to its version:
    http://HOST:PORT/v1. Return the folder that `eval/` is in, and one result for each set.
    `folder`: None: one for the model, below that of the endpoint in `runs`. Replies are written to
    disk as they arrive, so that a repeated call requests only the others. Raises MilesError."""
    from milescli.checkpoint.run_lock import lock

    url = checked_url(url)
    loaded, sets = sets_of_model(url, eval_options, environ=environ)
    for one in sets:
        _require_text_only(one.recipe)
    settings = loaded.recipe.eval.endpoint
    if doubt := unencrypted_key_warning(url, SECTION, settings):
        output.warn(doubt)
    model = asyncio.run(served_model(endpoint_of(url, settings), settings.model))
    folder = folder or folder_of_endpoint(url, runs) / re.sub(r"[^\w.-]+", "-", model)
    folder.mkdir(parents=True, exist_ok=True)
    run = RunDir(folder.absolute())
    with lock(run):
        loaded_sets = [
            load_set(one, run, _Inputs(TokenlessEncoder()), output=output) for one in sets
        ]
        _require_text_prompts(loaded_sets)
        return folder, _evaluate(url, model, loaded_sets, run, output=output)


def checked_url(url: str) -> str:
    """Return the URL without the path that the program appends itself. Raises RecipeError for a URL
    that cannot receive requests, and for a key in it, which would be written to disk."""
    parts = urlsplit(url)
    if not parts.hostname or parts.username or parts.password or parts.query or parts.fragment:
        raise RecipeError(
            "this is not the address of an endpoint"
            if not parts.hostname
            else "this address contains more than the endpoint",
            why="the address must look like http://HOST:PORT/v1, without a key or a query",
            fix="export MY_KEY=...; miles eval URL --set eval.endpoint.api_key_env=MY_KEY",
        )
    return base_url(url)


def _require_text_only(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe needs sampled tokens, or an engine."""
    rollout, plain = recipe.rollout, Rollout()
    extra_fields(recipe.eval.endpoint)
    needs = [
        key
        for key, is_set in (
            ("rollout.reward=reward_model", recipe.uses_reward_model),
            (f"rollout.agent={rollout.agent}", rollout.agent != plain.agent),
            (f"rollout.generation={rollout.generation}", rollout.generation != plain.generation),
        )
        if is_set
    ]
    if needs:
        raise RecipeError(
            "an endpoint cannot be evaluated in this way",
            why=f"`{needs[0]}` needs the tokens that a model samples, but an endpoint only "
            "returns text",
            fix="miles eval MODEL   # evaluates the same model from a folder or the hub",
        )


def _require_text_prompts(loaded_sets: Sequence[LoadedSet]) -> None:
    """Raise DataError if a prompt is given as tokens."""
    for one in loaded_sets:
        if as_tokens := next((prompt for prompt in one.prompts if prompt.token_ids), None):
            raise DataError(
                f"row {as_tokens.index + 1} of `{one.set.name}` contains tokens",
                why="an endpoint only accepts messages",
                fix=f"provide the prompts of `{one.set.name}` as text or as messages",
            )


def _evaluate(
    url: str, model: str, loaded_sets: Sequence[LoadedSet], run: RunDir, *, output: Output
) -> list[SetResult]:
    from milescli.runtime.recovery.supervise import StopSignals, run_watched

    results = list[SetResult]()

    async def work() -> None:
        for one in loaded_sets:
            cache = ReplyCache(run.eval_dir / one.set.folder / "replies.jsonl")
            note = f"; {len(cache)} replies are already stored" if len(cache) else ""
            output.note(f"{model}: {one.set.name}, {len(one.prompts)} prompts{note}")
            episodes = EndpointEpisodes(
                one.set.recipe,
                endpoint=endpoint_of(url, one.set.recipe.eval.endpoint),
                model=model,
                scorer=scorer_of(one.set.recipe, None),
                kept=cache,
            )
            try:
                named = f"{model} at {url}"
                results.append(
                    await measure_set(one, episodes, run=run, model=named, output=output)
                )
            except BaseException:
                output.note(
                    f"{len(cache)} replies are stored: repeat the command to request only the "
                    "others"
                )
                raise
            if doubt := episodes.score_warning():
                output.warn(doubt)
            cache.remove()

    async def main() -> None:
        signals = StopSignals(on_stop=lambda: False, resume_command=lambda: f"miles eval {url}")
        await run_watched(work(), [], signals, cause_grace_s=0.0)

    asyncio.run(main())
    return results
