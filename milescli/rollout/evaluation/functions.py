"""Chooses which samples an evaluation takes. `eval.function` names a function: built in here, an
entry point, or an import path; one of the user's runs in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from milescli.core.concurrency import all_or_first_error
from milescli.core.errors import RecipeError
from milescli.core.imports import import_object
from milescli.core.plug_points import EVALUATIONS
from milescli.core.types import Prompt, Sample
from milescli.core.user_code import plugin_fix
from milescli.recipe.schema import Evaluation
from milescli.workers.async_worker import AsyncWorker
from milescli.workers.child import parent_requests
from milescli.workers.worker import CallFailed

ALL = "all"


class Play(Protocol):
    """Plays one attempt at a prompt, with the recipe's agent."""

    async def __call__(self, place: int, index: int = 0) -> Sample:
        """Play one attempt. `place`: index of the prompt; equal place, index and weights give an
        equal sample. The sample is scored, unless the reward takes whole groups."""
        ...


class EvaluationFn(Protocol):
    """Defines a plug-in of `eval.function`: an async function."""

    async def __call__(
        self, *, prompts: Sequence[Prompt], play: Play, settings: Evaluation
    ) -> Sequence[Sequence[Sample]]:
        """Return the samples of each prompt that count, at least one; any number may be played."""
        ...


async def all_prompts(
    *, prompts: Sequence[Prompt], play: Play, settings: Evaluation
) -> Sequence[Sequence[Sample]]:
    """Play `samples_per_prompt` of each prompt, all at once."""
    count = settings.samples_per_prompt
    samples = await all_or_first_error(
        play(place, index) for place in range(len(prompts)) for index in range(count)
    )
    return [samples[place * count : (place + 1) * count] for place in range(len(prompts))]


def load_evaluation(settings: Evaluation) -> EvaluationFn:
    """Load the evaluation. Raises RecipeError if `eval.function` names nothing suitable."""
    function = EVALUATIONS.resolve(settings.function)
    if settings.function in EVALUATIONS.builtin:
        return cast(EvaluationFn, function)
    return EvaluationProcess(EVALUATIONS.path_of(settings.function))


async def run_evaluation(
    evaluate: EvaluationFn, prompts: Sequence[Prompt], play: Play, *, settings: Evaluation
) -> list[list[Sample]]:
    """Call the evaluation function and return the samples of each prompt. Raises RecipeError if the
    function fails, or returns something else; and what an episode raises."""
    made: Any = await evaluate(prompts=prompts, play=play, settings=settings)
    try:
        rows = [list(samples) for samples in made]
    except TypeError:
        rows = []
    fits = len(rows) == len(prompts) and all(rows)
    if fits and all(isinstance(sample, Sample) for row in rows for sample in row):
        return rows
    raise RecipeError(
        f"the evaluation `{settings.function}` returned {made!r:.200}",
        why=f"each of {len(prompts)} prompts needs a list of at least one sample",
        fix=plugin_fix(settings.function),
    )


class EvaluationProcess:
    """Implements EvaluationFn by the user's function, in a process of its own. Belongs to one event
    loop."""

    def __init__(self, path: str) -> None:
        """Take a resolved import path."""
        self.__name__ = path
        self._process = AsyncWorker(f"{__name__}:evaluate_in_process")

    async def __call__(
        self, *, prompts: Sequence[Prompt], play: Play, settings: Evaluation
    ) -> Sequence[Sequence[Sample]]:
        """Run the function in the process, as EvaluationFn describes. Raises RecipeError if it
        fails."""
        path = self.__name__
        try:
            return await self._process.call(path, list(prompts), settings, answer=play)
        except CallFailed as error:
            raise RecipeError(
                f"the evaluation `{path}` failed", why=str(error), fix=plugin_fix(path)
            ) from None


async def evaluate_in_process(path: str, prompts: list[Prompt], settings: Evaluation) -> Any:
    """Run the evaluation in the process of the user's function."""
    function: Any = import_object(path)
    side = parent_requests.get()

    async def play(place: int, index: int = 0) -> Sample:
        return await side.request((place, index))

    return await function(prompts=prompts, play=play, settings=settings)
