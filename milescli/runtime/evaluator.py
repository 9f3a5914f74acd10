"""How good are the weights that the engines hold? Held-out prompts, played by the run's own agent,
scored and kept. Used in a run and by `miles eval`."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from milescli.core.concurrency import all_or_first_error, in_thread
from milescli.core.errors import WaitTimeout
from milescli.core.events import EvalDone
from milescli.core.types import Group, Prompt, Sample, StopReason
from milescli.recipe.schema import Recipe
from milescli.rollout.episode import Plays
from milescli.rollout.evaluations import EvaluationFn, load_evaluation, played
from milescli.rollout.metrics import load_metrics, measured
from milescli.rollout.stats import mean_figures, mean_parts
from milescli.runtime.eval_records import write_lines
from milescli.runtime.side_files import SideFiles

Watch = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Samples that will be asked for -> what is told how many more are done."""


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Evaluates whatever weights the engines hold."""

    recipe: Recipe
    prompts: list[Prompt]
    episodes: Plays
    """Sampled as the recipe's `eval` says."""
    folder: Path
    """Where samples are written; the run's `eval/`."""
    set_name: str = ""
    """Of the prompts: a folder in `folder`; empty: the run's own held-out ones, in `folder`."""
    watch: Watch = lambda total: nullcontext(lambda num: None)
    """Sees how many samples are done."""
    side: SideFiles | None = None
    """Where the samples may be missing if the disk is full; None: that is an error."""
    _evaluate: EvaluationFn = field(init=False)

    def __post_init__(self) -> None:
        self._evaluate = load_evaluation(self.recipe.eval)

    async def run(self, step: int) -> EvalDone:
        """Play all prompts at once, and write `step_<n>.jsonl`. Raises what an episode raises, and
        WaitTimeout where none ends within `machine.step_timeout_s`."""
        return (await self.measure(step))[0]

    async def measure(self, step: int) -> tuple[EvalDone, list[Group]]:
        """The same, with what was sampled."""
        began, settings = time.monotonic(), self.recipe.eval
        count = len(self.prompts) * settings.samples_per_prompt
        with self.watch(count) as progress:
            groups = await self._play(progress)
        samples = [sample for group in groups for sample in group.samples]
        path = self.folder / self.set_name / f"step_{step}.jsonl"
        with self.side.writing(path) if self.side else nullcontext():
            write_lines(path, groups)
        metrics = load_metrics(settings.metrics)
        figures = await in_thread(lambda: measured(metrics, groups, settings=settings))
        parts = {f"reward/{name}": mean for name, mean in mean_parts(samples).items()}
        parts |= {f"agent/{name}": mean for name, mean in mean_figures(samples).items()}
        num_truncated = sum(sample.stop_reason is StopReason.LENGTH for sample in samples)
        done = EvalDone(
            step=step,
            accuracy=sum(sample.reward or 0.0 for sample in samples) / len(samples),
            num_prompts=len(self.prompts),
            truncated_fraction=num_truncated / len(samples),
            response_tokens_mean=sum(sample.num_loss_tokens for sample in samples) / len(samples),
            seconds=time.monotonic() - began,
            path=str(path.relative_to(self.folder.parent)),
            figures={**figures, **parts},
        )
        return done, groups

    async def _play(self, progress: Callable[[int], None]) -> list[Group]:
        """One for each prompt, in order, all samples scored."""
        bound_s, loop = self.recipe.machine.step_timeout_s, asyncio.get_running_loop()
        begun, done = list[int](), list[int]()

        async def play(place: int, index: int = 0) -> Sample:
            prompt = self.prompts[place]
            begun.append(place)
            seed = self._seed(prompt, index)
            sample = await self.episodes.play(prompt, sample_index=index, seed=seed)
            done.append(place)
            progress(1)
            if not bound.expired():
                bound.reschedule(loop.time() + bound_s)
            return sample

        try:
            async with asyncio.timeout(bound_s) as bound:
                settings = self.recipe.eval
                rows = await played(self._evaluate, self.prompts, play, settings=settings)
                scored = map(self.episodes.scored, self.prompts, rows)
                samples = await all_or_first_error(scored)
        except TimeoutError:
            if not bound.expired():
                raise
            raise WaitTimeout(
                "the evaluation waited too long for a sample",
                why=f"{len(done)} of {len(begun)} were done, and no other within {bound_s:g} s"
                + self._first_of(Counter(begun) - Counter(done)),
                fix=[
                    f"--set machine.step_timeout_s={2 * bound_s:g}",
                    f"look whether the agent `{self.episodes.agent_name}` waits for something",
                ],
            ) from None
        return [
            Group(prompt=prompt, samples=row)
            for prompt, row in zip(self.prompts, samples, strict=True)
        ]

    def _first_of(self, missing: Counter[int]) -> str:
        """`; prompt 3 is the first that is missing`, where one is."""
        if not missing:
            return ""
        return f"; prompt {self.prompts[min(missing)].index} is the first that is missing"

    def _seed(self, prompt: Prompt, index: int) -> int:
        key = f"{self.recipe.run.seed}/eval/{prompt.index}/{index}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1
