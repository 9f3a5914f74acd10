"""Evaluates the engines' current weights: plays held-out prompts with the run's own agent, scores
the samples, and writes them. Used by training, in which separate engines may evaluate while it
continues, and by `miles eval`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.console.transfer import Transfer
from milescli.core.concurrency import all_or_first_error, in_thread
from milescli.core.errors import MilesError, WaitTimeout
from milescli.core.events import EvalDone
from milescli.core.plug_points import METRICS
from milescli.core.types import Group, Prompt, Sample, StopReason, WeightVersion
from milescli.recipe.schema import Recipe
from milescli.rollout.collect.rollout_stats import mean_figures, mean_parts
from milescli.rollout.episode.episode import EpisodePlayer
from milescli.rollout.episode.unscored import (
    INFRASTRUCTURE_ERRORS,
    UnscoredCounter,
    unscored_sample,
)
from milescli.rollout.evaluation.functions import EvaluationFn, load_evaluation, run_evaluation
from milescli.rollout.evaluation.metrics import compute_metrics
from milescli.rollout.evaluation.scores import fewest_samples, scores_of
from milescli.rollout.rewards import answer_extractor
from milescli.runtime.devices import Devices
from milescli.runtime.evaluation.results import (
    SetResult,
    rows_of,
    settings_of,
    sha256_of_prompts,
    write_lines,
    write_result,
)
from milescli.runtime.evaluation.sets import LoadedSet
from milescli.runtime.recording.sample_files import write_images
from milescli.runtime.recording.side_files import SideFiles
from milescli.workers.isolated import resolve_isolated

Watch = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Takes the number of samples; returns a context whose function is called with the number of new
ones."""


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Evaluates whatever weights the engines hold."""

    recipe: Recipe
    prompts: list[Prompt]
    episodes: EpisodePlayer
    """Sampled as the recipe's `eval` says."""
    folder: Path
    """Where samples are written; the run's `eval/`."""
    set_name: str = ""
    """Name of the set of prompts: a folder in `folder`; empty: the run's own held-out prompts, in
    `folder`."""
    watch: Watch = lambda total: nullcontext(lambda num: None)
    """Shows how many samples are done."""
    side: SideFiles | None = None
    """Writes the samples if the disk is not full; None: a full disk is an error."""
    tell: Callable[[str], None] | None = None
    """Called for prompts that are excluded because a sample could not be scored."""
    _evaluate: EvaluationFn = field(init=False)

    def __post_init__(self) -> None:
        self._evaluate = load_evaluation(self.recipe.eval)

    async def run(self, step: int) -> EvalDone:
        """Play all prompts at once, and write `step_<n>.jsonl`. A prompt is excluded if one of its
        samples cannot be scored. Raises what an episode raises, and WaitTimeout if no episode ends
        within `machine.step_timeout_s`."""
        return (await self.measure(step))[0]

    async def measure(self, step: int) -> tuple[EvalDone, list[Group]]:
        """Evaluate like `run`; also return the scored samples."""
        began, settings = time.monotonic(), self.recipe.eval
        count = len(self.prompts) * settings.samples_per_prompt
        with self.watch(count) as progress:
            groups = await self._play(progress)
        samples = [sample for group in groups for sample in group.samples]
        path = self.folder / self.set_name / f"step_{step}.jsonl"
        with self.side.writing(path) if self.side else nullcontext():
            write_images(RunDir(self.folder.parent), groups)
            write_lines(path, groups)
        metrics = resolve_isolated(METRICS, settings.metrics)
        figures = await in_thread(lambda: compute_metrics(metrics, groups, settings=settings))
        parts = {f"reward/{name}": mean for name, mean in mean_parts(samples).items()}
        parts |= {f"agent/{name}": mean for name, mean in mean_figures(samples).items()}
        if num_excluded := len(self.prompts) - len(groups):
            parts["unscored_prompts"] = float(num_excluded)
        num_truncated = sum(sample.stop_reason is StopReason.LENGTH for sample in samples)
        done = EvalDone(
            step=step,
            accuracy=sum(sample.reward or 0.0 for sample in samples) / len(samples),
            num_prompts=len(groups),
            truncated_fraction=num_truncated / len(samples),
            response_tokens_mean=sum(sample.num_loss_tokens for sample in samples) / len(samples),
            seconds=time.monotonic() - began,
            path=str(path.relative_to(self.folder.parent)),
            figures={**figures, **parts},
        )
        return done, groups

    async def _play(self, progress: Callable[[int], None]) -> list[Group]:
        """Play all prompts; return a group for each that is not excluded, in order, with all
        samples scored."""
        bound_s, loop = self.recipe.machine.step_timeout_s, asyncio.get_running_loop()
        begun, done, excluded = list[int](), list[int](), set[int]()
        count = self.recipe.eval.samples_per_prompt
        unscored = UnscoredCounter(
            share=self.recipe.rollout.max_unscored_share,
            total=len(self.prompts) * count,
            what="the evaluation",
            tell=self.tell,
        )

        def exclude(place: int, error: MilesError) -> None:
            if place not in excluded:
                unscored.exclude(error, num=count)
                excluded.add(place)

        async def play(place: int, index: int = 0) -> Sample:
            prompt = self.prompts[place]
            begun.append(place)
            seed = self._seed(prompt, index)
            try:
                sample = await self.episodes.play(prompt, sample_index=index, seed=seed)
            except INFRASTRUCTURE_ERRORS as error:
                exclude(place, error)
                sample = unscored_sample(sample_index=index, seed=seed)
            done.append(place)
            progress(1)
            if not bound.expired():
                bound.reschedule(loop.time() + bound_s)
            return sample

        async def score_row(place: int, row: list[Sample]) -> Group | None:
            if place in excluded:
                return None
            prompt = self.prompts[place]
            try:
                return Group(prompt=prompt, samples=await self.episodes.score_samples(prompt, row))
            except INFRASTRUCTURE_ERRORS as error:
                exclude(place, error)
                return None

        try:
            async with asyncio.timeout(bound_s) as bound:
                settings = self.recipe.eval
                rows = await run_evaluation(self._evaluate, self.prompts, play, settings=settings)
                groups = await all_or_first_error([score_row(*row) for row in enumerate(rows)])
        except TimeoutError:
            if not bound.expired():
                raise
            raise WaitTimeout(
                "timed out waiting for a sample of the evaluation",
                why=f"{len(done)} of {len(begun)} are complete, and no other finished within "
                f"{bound_s:g} s" + self._first_of(Counter(begun) - Counter(done)),
                fix=[
                    f"--set machine.step_timeout_s={2 * bound_s:g}",
                    f"check whether the agent `{self.episodes.agent_name}` is waiting for "
                    "something",
                ],
            ) from None
        return [group for group in groups if group is not None]

    def _first_of(self, missing: Counter[int]) -> str:
        """Return a clause that names the prompt of the first missing sample, if there is one."""
        if not missing:
            return ""
        return f"; the first missing one is of prompt {self.prompts[min(missing)].index}"

    def _seed(self, prompt: Prompt, index: int) -> int:
        key = f"{self.recipe.run.seed}/eval/{prompt.index}/{index}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1


async def measure_set(
    one: LoadedSet,
    episodes: EpisodePlayer,
    *,
    run: RunDir,
    model: str,
    output: Output,
    step: int = 0,
) -> SetResult:
    """Evaluate one set with `episodes`, and show the progress. Raises what the evaluator raises."""

    def watch(total: int) -> Transfer:
        return Transfer(output, label=f"asking {one.set.name}", total=total, unit="samples")

    evaluator = Evaluator(
        recipe=one.set.recipe,
        prompts=one.prompts,
        episodes=episodes,
        folder=run.eval_dir,
        set_name=one.set.folder,
        watch=watch,
        tell=output.warn,
    )
    done, groups = await evaluator.measure(step)
    fewest, function = fewest_samples(groups), one.set.recipe.eval.function
    if too_many := [f"pass@{k}" for k in one.set.ks if k > fewest]:
        output.warn(
            f"{one.set.name}: {', '.join(too_many)} cannot be computed, as `{function}` "
            f"(eval.function) returned only {fewest} sample{'s'[: fewest > 1]} of a prompt"
        )
    return await in_thread(partial(result_of, one, done, groups, model=model, run=run))


def result_of(
    one: LoadedSet, done: EvalDone, groups: Sequence[Group], *, model: str, run: RunDir
) -> SetResult:
    """Compute the result of a set from its samples; write JSONL, parquet and JSON at
    `done.path`."""
    recipe, answer = one.set.recipe, answer_extractor(one.set.recipe.rollout)
    scored = {group.prompt.index for group in groups}
    scores = scores_of(groups, ks=one.set.ks, answer=answer, domains=one.domains)
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
        unscored=[place for place, p in enumerate(one.prompts) if p.index not in scored],
        figures=done.figures,
    )
    write_result(result, rows_of(groups, domains=one.domains, answer=answer), folder=run.path)
    return result


class ConcurrentEvaluations:
    """Runs evaluations on separate engines, which get the weights of a step and answer while the
    run continues; one evaluation at a time. Belongs to one event loop."""

    def __init__(
        self,
        devices: Devices,
        measure: Callable[[int], Awaitable[None]],
        *,
        tell: Callable[[str], None],
    ) -> None:
        """Set up evaluations. `devices`: the trainer, and the engines for evaluations; `measure`:
        evaluates with these engines and reports the result; `tell`: warns the user."""
        self._devices, self._measure, self._tell = devices, measure, tell
        self._running: asyncio.Future[None] | None = None
        self._step = 0

    async def begin(self, step: int, version: WeightVersion, *, verify: bool) -> None:
        """Wait for the evaluation before, send the trainer's weights, which are those of `step`, to
        the engines, and start the evaluation. Raises what the one before raised, or the publish."""
        await self.finish()
        await self._devices.publish(version, verify=verify)
        self._running, self._step = asyncio.ensure_future(self._measure(step)), step

    async def finish(self) -> None:
        """Wait for the last evaluation. Raises what it raised."""
        while (running := self._running) is not None:
            await asyncio.wait({running})
            if running is self._running:  # else it was given up meanwhile
                running.result()
                self._running = None

    def give_up(self) -> None:
        """Abandon the running evaluation because all its engines died: the trainer has moved on, so
        new engines cannot get the weights of its step."""
        if self._running is not None:
            self._running.cancel()
            self._running = None
            self._tell(f"the evaluation of step {self._step} was abandoned: its engines died")

    async def drop(self) -> None:
        """Cancel the running evaluation and ignore its result."""
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._running
            self._running = None

    async def probe(self) -> None:
        """Raise what the running evaluation raised, so that the run ends at once."""
        running = self._running
        if running is not None and running.done() and not running.cancelled():
            running.result()
