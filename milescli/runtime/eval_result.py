"""From the samples of one set to its result, written and returned. Called by `evaluate`, off the
event loop."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from milescli.checkpoint.run_dir import RunDir
from milescli.core.events import EvalDone
from milescli.core.types import Group
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
