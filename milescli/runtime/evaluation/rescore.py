"""Implements `miles rewards`: scores the samples that a run stored with another reward, and reports
what would change. Needs no engine and no device; a user's reward runs in a process of its own, as
in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from milescli.checkpoint.run_dir import RunDir, open_run
from milescli.core.concurrency import all_or_first_error
from milescli.core.errors import CheckpointError, RecipeError
from milescli.core.plug_points import ADVANTAGES
from milescli.core.types import Group, Image, Prompt, Sample, StopReason
from milescli.insight.samples import (
    KeptSample,
    by_group,
    images_in,
    read_image,
    read_samples,
    sample_steps,
)
from milescli.recipe.load import LoadedRecipe, override
from milescli.recipe.resolved import load_resolved
from milescli.recipe.schema import Recipe
from milescli.rollout.evaluation.agreement import (
    Agreement,
    Suspicion,
    find_suspicions,
    measure_agreement,
)
from milescli.rollout.rewards import scorer_of
from milescli.rollout.rewards.scoring import Response, Scoring
from milescli.train.advantages import estimate, keeps_state
from milescli.workers.isolated import resolve_isolated

SERVED = "reward_model"
"""The reward that needs an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """Holds one sample with its scores under both rewards."""

    step: int
    prompt: Prompt
    sample: Sample
    a: float
    b: float
    advantage_a: float | None
    """None if the recipe's estimator cannot be applied to stored samples."""
    advantage_b: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Describes how two rewards score the samples of a run."""

    names: tuple[str, str]
    samples: list[Rescored]
    agreement: Agreement
    suspicions: list[Suspicion]
    means: tuple[float, float]
    silent_groups: tuple[int, int]
    """Groups whose rewards are all equal: a group-relative advantage learns nothing from them."""
    no_advantages: str
    """Why there are no advantages; empty if there are."""
    without_label: tuple[int, int]
    """(number of samples that only the second reward calls right and that do not contain the label,
    number of such samples whose label is one line)."""

    @property
    def flips(self) -> list[Rescored]:
        """Return the samples whose reward changes, the largest changes first."""
        changed = [one for one in self.samples if one.a != one.b]
        return sorted(changed, key=lambda one: -abs(one.b - one.a))


def compare_rewards(
    path: Path,
    *,
    rewards: tuple[str | None, str],
    sets: Sequence[str] = (),
    last: int | None = None,
    right_above: float = 0.0,
) -> Comparison:
    """Score the stored samples of the run in `path`, of its `last` steps. `rewards`: names as
    `rollout.reward` takes them; None: the rewards that the run recorded. Raises CheckpointError if
    no samples were stored, RecipeError or RewardError for a reward that cannot be used."""
    run = open_run(path)
    loaded = load_resolved(run.recipe_file)
    samples = [one for step in sample_steps(run)[-(last or 0) :] for one in read_samples(run, step)]
    grouped = [(members[0].step, members) for members in by_group(samples)]
    if not grouped:
        raise CheckpointError(
            f"run `{run.name}` kept no samples",
            why=f"{run.rollouts_dir} has none; `run.keep_groups` is "
            f"{loaded.recipe.run.keep_groups}, and a run of rows samples nothing",
            fix=f"miles resume {run.typed} --set run.keep_groups=8   # keeps some from now on",
        )
    groups = [_group(members, run) for _, members in grouped]
    scored = [
        [[float(one.reward or 0.0) for one in members] for _, members in grouped]
        if name is None
        else asyncio.run(_scored(_scorer(loaded, name, sets), groups))
        for name in rewards
    ]
    labels = (rewards[0] or "as recorded", rewards[1])
    return _make_comparison(
        loaded.recipe, labels, [step for step, _ in grouped], groups, scored, right_above
    )


def _scorer(loaded: LoadedRecipe, name: str, sets: Sequence[str]) -> Scoring:
    words = [f"rollout.reward={name}", *sets]
    rollout = override(loaded, sets=words, only=("rollout",)).recipe.rollout
    if SERVED in rollout.reward_names:
        raise RecipeError(
            f"`{SERVED}` cannot be tried on kept samples",
            why="an engine must hold its model, and this command starts none",
            fix=f"miles eval RUN --set rollout.reward={SERVED}   # starts engines",
        )
    return scorer_of(rollout)


async def _scored(scorer: Scoring, groups: Sequence[Group]) -> list[list[float]]:
    """Return [groups][samples of the group] scores. The scorer limits how many calls run at
    once."""

    async def one(group: Group) -> list[float]:
        responses = [
            Response(text=sample.text, num_tokens=sample.num_loss_tokens)
            for sample in group.samples
        ]
        return [score.reward for score in await scorer.score_responses(group.prompt, responses)]

    return await all_or_first_error([one(group) for group in groups])


def _group(members: Sequence[KeptSample], run: RunDir) -> Group:
    """Make a group; of images only the files are filled in, because a reward reads nothing else."""
    record = members[0].record
    images = [
        Image(sha256=sha, png=png, width=0, height=0, grid=(1, 0, 0), num_tokens=0)
        for sha in images_in(record)
        if (png := read_image(run, sha))
    ]
    prompt = Prompt(
        index=members[0].prompt_index,
        token_ids=[],
        text=members[0].prompt,
        label=record.get("label"),
        images=images,
    )
    samples = [
        Sample(
            sample_index=place,
            seed=0,
            trajectories=[],
            text=one.response,
            stop_reason=StopReason.LENGTH if one.stop_reason == "length" else StopReason.STOP,
            num_counted_tokens=len(one.record.get("response_ids") or ()),
        )
        for place, one in enumerate(members)
    ]
    return Group(prompt=prompt, samples=samples)


def _make_comparison(
    recipe: Recipe,
    names: tuple[str, str],
    steps: Sequence[int],
    groups: Sequence[Group],
    scored: Sequence[list[list[float]]],
    right_above: float,
) -> Comparison:
    a, b = scored
    (rows_a, why), (rows_b, _) = (_advantages(recipe, steps, groups, rows) for rows in scored)
    samples = [
        Rescored(
            step=step,
            prompt=group.prompt,
            sample=sample,
            a=a[number][place],
            b=b[number][place],
            advantage_a=rows_a[number][place] if rows_a else None,
            advantage_b=rows_b[number][place] if rows_b else None,
        )
        for number, (step, group) in enumerate(zip(steps, groups, strict=True))
        for place, sample in enumerate(group.samples)
    ]
    only_b = [one for one in samples if one.b > right_above >= one.a]
    labelled = [one for one in only_b if one.prompt.label and "\n" not in one.prompt.label]
    count = len(samples)
    return Comparison(
        names=names,
        samples=samples,
        agreement=measure_agreement(a, b, right_above=right_above),
        suspicions=find_suspicions([group.samples for group in groups], a, b),
        means=(sum(one.a for one in samples) / count, sum(one.b for one in samples) / count),
        silent_groups=(sum(len(set(r)) == 1 for r in a), sum(len(set(r)) == 1 for r in b)),
        no_advantages=why,
        without_label=(
            sum(str(one.prompt.label).strip() not in one.sample.text for one in labelled),
            len(labelled),
        ),
    )


def _advantages(
    recipe: Recipe, steps: Sequence[int], groups: Sequence[Group], rewards: Sequence[list[float]]
) -> tuple[list[list[float]], str]:
    """Return [groups][samples of the group] advantages, as the recipe's estimator computes them for
    the groups of a step, and an empty text; or no advantages, and the reason."""
    estimator = resolve_isolated(ADVANTAGES, recipe.train.advantage)
    name = recipe.train.advantage
    needs_more = any(getattr(estimator, f"needs_{what}", False) for what in ("greedy", "weights"))
    if recipe.has_critic or needs_more or keeps_state(estimator):
        return [], f"`{name}` needs more than the rewards of kept samples"
    rows = list[list[float]]()
    for step in dict.fromkeys(steps):
        places = [number for number, one in enumerate(steps) if one == step]
        scored = [
            replace(
                groups[number],
                samples=[
                    replace(sample, reward=reward)
                    for sample, reward in zip(groups[number].samples, rewards[number], strict=True)
                ],
            )
            for number in places
        ]
        for row in estimate(estimator, scored, settings=recipe.train):
            if not all(isinstance(value, int | float) for value in row):
                return [], f"`{name}` gives each token a value of its own"
            rows.append([float(value) for value in row])  # type: ignore[arg-type]
    return rows, ""
