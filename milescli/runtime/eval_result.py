"""One set, put to a model: its samples, and what they come to, written and returned. Called by
`evaluate` and `evaluate_endpoint`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.console.transfer import Transfer
from milescli.core.concurrency import in_thread
from milescli.core.events import EvalDone
from milescli.core.types import Group
from milescli.rollout.episode import Plays
from milescli.rollout.rewards import answer_of
from milescli.rollout.scores import scores_of
from milescli.runtime.eval_records import (
    SetResult,
    rows_of,
    settings_of,
    sha256_of_prompts,
    write_result,
)
from milescli.runtime.eval_sets import LoadedSet
from milescli.runtime.evaluator import Evaluator


async def measured(
    one: LoadedSet, episodes: Plays, *, run: RunDir, model: str, output: Output, step: int = 0
) -> SetResult:
    """Put a set to whoever `episodes` asks, and show how far it is. Raises what the evaluator
    raises."""

    def watch(total: int) -> Transfer:
        return Transfer(output, label=f"asking {one.set.name}", total=total, unit="samples")

    evaluator = Evaluator(
        recipe=one.set.recipe,
        prompts=one.prompts,
        episodes=episodes,
        folder=run.eval_dir,
        set_name=one.set.folder,
        watch=watch,
    )
    done, groups = await evaluator.measure(step)
    return await in_thread(partial(result_of, one, done, groups, model=model, run=run))


def result_of(
    one: LoadedSet, done: EvalDone, groups: Sequence[Group], *, model: str, run: RunDir
) -> SetResult:
    """What the samples come to; writes JSONL, parquet and JSON where `done.path` is."""
    recipe, answer = one.set.recipe, answer_of(one.set.recipe.rollout)
    scores = scores_of(
        groups, ks=one.set.ks, answer=answer, domains=one.domains, seed=recipe.run.seed
    )
    result = SetResult(
        model=model,
        step=done.step,
        set=one.set.name,
        accuracy=done.accuracy,
        num_prompts=done.num_prompts,
        samples_per_prompt=scores.samples_per_prompt,
        estimates=scores.estimates,
        domains=scores.domains,
        truncated_fraction=done.truncated_fraction,
        response_tokens_mean=done.response_tokens_mean,
        seconds=done.seconds,
        path=done.path,
        data_sha256=sha256_of_prompts(one.prompts),
        settings=settings_of(recipe),
        rewards=[fmean(group.rewards) for group in groups],
        figures=done.figures,
    )
    write_result(result, rows_of(groups, domains=one.domains, answer=answer), folder=run.path)
    return result
