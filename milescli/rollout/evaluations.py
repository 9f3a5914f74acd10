"""Which samples an evaluation takes. `eval.function` names a way: built in here, an entry point, or
an import path; one of the user's runs in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from milescli.core.async_apart import AsyncApart
from milescli.core.errors import RecipeError
from milescli.core.registry import Registry
from milescli.core.types import Prompt, Sample
from milescli.core.user_code import mend
from milescli.core.user_process import CallFailed
from milescli.core.user_worker import asking
from milescli.recipe.schema import Evaluation
from milescli.rollout.collector import all_or_first_error

ALL = "all"


class Play(Protocol):
    """One attempt at a prompt, by the recipe's agent."""

    async def __call__(self, place: int, index: int = 0) -> Sample:
        """`place`: of the prompt; equal place, index and weights give an equal sample. Scored,
        unless the reward takes whole groups."""
        ...


class EvaluationFn(Protocol):
    """A plug-in of `eval.function`: an async function."""

    async def __call__(
        self, *, prompts: Sequence[Prompt], play: Play, settings: Evaluation
    ) -> Sequence[Sequence[Sample]]:
        """The samples of each prompt that count, one at least; any number may be played."""
        ...


EVALUATIONS = Registry(
    "evaluation",
    {ALL: "milescli.rollout.evaluations:all_prompts"},
    signature=("prompts", "play", "settings"),
)


async def all_prompts(
    *, prompts: Sequence[Prompt], play: Play, settings: Evaluation
) -> Sequence[Sequence[Sample]]:
    """`samples_per_prompt` of each, all at once."""
    count = settings.samples_per_prompt
    samples = await all_or_first_error(
        play(place, index) for place in range(len(prompts)) for index in range(count)
    )
    return [samples[place * count : (place + 1) * count] for place in range(len(prompts))]


async def played(
    prompts: Sequence[Prompt], play: Play, *, settings: Evaluation
) -> list[list[Sample]]:
    """The samples of each prompt. Raises RecipeError where the function fails, or gives something
    else; what an episode raises."""
    if settings.function in EVALUATIONS.builtin:
        return [
            list(samples)
            for samples in await all_prompts(prompts=prompts, play=play, settings=settings)
        ]
    path = EVALUATIONS.path_of(settings.function, key="eval.function")
    apart = AsyncApart(f"{__name__}:evaluate_there")
    try:
        made = await apart.call(path, list(prompts), settings, answer=play)
    except CallFailed as error:
        raise RecipeError(
            f"the evaluation `{settings.function}` failed",
            why=str(error),
            fix=mend(settings.function),
        ) from None
    finally:
        apart.close()
    return _checked(made, prompts, settings.function)


def _checked(made: Any, prompts: Sequence[Prompt], name: str) -> list[list[Sample]]:
    try:
        rows = [list(samples) for samples in made]
    except TypeError:
        rows = []
    fits = len(rows) == len(prompts) and all(rows)
    if fits and all(isinstance(sample, Sample) for row in rows for sample in row):
        return rows
    raise RecipeError(
        f"the evaluation `{name}` gave {made!r:.200}",
        why=f"of {len(prompts)} prompts each has one sample or more, in a list of its own",
        fix=mend(name),
    )


async def evaluate_there(path: str, prompts: list[Prompt], settings: Evaluation) -> Any:
    """In the process of the user's function."""
    function: Any = Registry.resolve_any(path)
    side = asking.get()

    async def play(place: int, index: int = 0) -> Sample:
        return await side.ask((place, index))

    return await function(prompts=prompts, play=play, settings=settings)


def check_evaluation(function: EvaluationFn) -> list[list[Sample]]:
    """What it makes of three prompts whose samples are right at random. Raises RecipeError."""
    from milescli.core.examples import example_groups

    groups = example_groups()

    async def play(place: int, index: int = 0) -> Sample:
        await asyncio.sleep(0)
        samples = groups[place].samples
        return samples[index % len(samples)]

    async def run() -> Any:
        prompts = [group.prompt for group in groups]
        return await function(prompts=prompts, play=play, settings=Evaluation(samples_per_prompt=2))

    made = asyncio.run(run())
    return _checked(made, [group.prompt for group in groups], getattr(function, "__name__", "it"))
