"""How good are the weights that the engines hold? Held-out prompts, played by the run's own agent,
scored and kept. Used in a run and by `miles eval`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from milescli.core.errors import WaitTimeout
from milescli.core.events import EvalDone
from milescli.core.threads import in_thread
from milescli.core.types import Group, Prompt, Sample, StopReason
from milescli.recipe.schema import Recipe
from milescli.rollout.collector import all_or_first_error
from milescli.rollout.episode import Episodes
from milescli.rollout.metrics import load_metrics, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates whatever weights the engines hold."""

    recipe: Recipe
    prompts: list[Prompt]
    episodes: Episodes
    """Sampled as the recipe's `eval` says."""
    folder: Path
    """Where samples are written; the run's `eval/`."""

    async def run(self, step: int) -> EvalDone:
        """Play all prompts at once, and write `step_<n>.jsonl`. Raises what an episode raises, and
        WaitTimeout where none ends within `machine.step_timeout_s`."""
        began, settings = time.monotonic(), self.recipe.eval
        attempts = [
            (prompt, index)
            for prompt in self.prompts
            for index in range(settings.samples_per_prompt)
        ]
        played, count = await self._play(attempts), settings.samples_per_prompt
        scored = [
            self.episodes.scored(prompt, played[place * count : (place + 1) * count])
            for place, prompt in enumerate(self.prompts)
        ]
        groups = [
            Group(prompt=prompt, samples=samples)
            for prompt, samples in zip(self.prompts, await all_or_first_error(scored), strict=True)
        ]
        samples = [sample for group in groups for sample in group.samples]
        path = self._write(step, [prompt for prompt, _ in attempts], samples)
        metrics = load_metrics(settings.metrics)
        figures = await in_thread(lambda: measured(metrics, groups, settings=settings))
        num_truncated = sum(sample.stop_reason is StopReason.LENGTH for sample in samples)
        return EvalDone(
            step=step,
            accuracy=sum(sample.reward or 0.0 for sample in samples) / len(samples),
            num_prompts=len(self.prompts),
            truncated_fraction=num_truncated / len(samples),
            response_tokens_mean=sum(sample.num_loss_tokens for sample in samples) / len(samples),
            seconds=time.monotonic() - began,
            path=str(path.relative_to(self.folder.parent)),
            figures=figures,
        )

    async def _play(self, attempts: Sequence[tuple[Prompt, int]]) -> list[Sample]:
        """One sample for each, in order."""
        bound_s, loop = self.recipe.machine.step_timeout_s, asyncio.get_running_loop()
        missing = set(range(len(attempts)))

        async def play(number: int) -> Sample:
            prompt, index = attempts[number]
            seed = self._seed(prompt, index)
            sample = await self.episodes.play(prompt, sample_index=index, seed=seed)
            missing.remove(number)
            if not bound.expired():
                bound.reschedule(loop.time() + bound_s)
            return sample

        try:
            async with asyncio.timeout(bound_s) as bound:
                return await all_or_first_error(map(play, range(len(attempts))))
        except TimeoutError:
            if not bound.expired():
                raise
            raise WaitTimeout(
                "the evaluation waited too long for a sample",
                why=f"{len(attempts) - len(missing)} of {len(attempts)} were done, and no other "
                f"within {bound_s:g} s; prompt {attempts[min(missing)][0].index} is the first that "
                "is missing",
                fix=[
                    f"--set machine.step_timeout_s={2 * bound_s:g}",
                    f"look whether the agent `{self.episodes.agent_name}` waits for something",
                ],
            ) from None

    def _seed(self, prompt: Prompt, index: int) -> int:
        key = f"{self.recipe.run.seed}/eval/{prompt.index}/{index}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1

    def _write(self, step: int, prompts: list[Prompt], samples: list[Sample]) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step}.jsonl"
        lines = [
            json.dumps(
                {
                    "prompt": prompt.text,
                    "response": sample.text,
                    "label": prompt.label,
                    "reward": sample.reward,
                    "stop_reason": sample.stop_reason.value,
                    "prompt_ids": prompt.token_ids,
                    "response_ids": sample.response_ids,
                }
            )
            for prompt, sample in zip(prompts, samples, strict=True)
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path
