"""Does the engine compute what the trainer computes? Asked before the first step of every run; a
run on wrong engines never starts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milescli.core.errors import MismatchError
from milescli.core.events import EngineTrainerChecked
from milescli.core.types import Prompt, Trajectory
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.rollout.base import GenerateRequest
from milescli.rollout.session import RecordingSession
from milescli.runtime.devices import Devices
from milescli.train.objectives import load_objective
from milescli.train.packing import pack

NUM_PROMPTS = 8
MAX_NEW_TOKENS = 32
BOUND_MAX = {"fp32": 1e-4, "bf16": 0.5}
"""Largest |engine - trainer| log-prob that rounding explains, per token. fp32: 1e-6 to 5e-5 were
seen on CPU. bf16: not measured; kernels differ, and single tokens of small probability stray far
(the mean is what tells)."""
BOUND_MEAN = {"fp32": 1e-5, "bf16": 0.03}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """|engine - trainer| over the sampled tokens."""

    mean: float
    max: float
    num_tokens: int
    worst_prompt: int
    worst_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthCheck:
    """Everything that the question needs."""

    recipe: Recipe
    plan: Plan
    num_layers: int
    devices: Devices
    """Engines and trainer, with equal weights; they take turns where they share devices."""

    async def run(self, prompts: Sequence[Prompt]) -> EngineTrainerChecked:
        """Let the engine respond to the prompts and the trainer score the responses. Both hold the
        same weights afterwards, and the engines answer.

        Raises MismatchError beyond the precision's bound; it says by how much, and which weight or
        layer is the first to differ.
        """
        trajectories = await self._sampled(prompts)
        difference = compare(prompts, trajectories, await self._scored(trajectories))
        if not self._is_fine(difference):
            raise self._mismatch(difference, await self._blame(prompts))
        if self.devices.engines_asleep:
            await self.devices.publish(self.devices.version)
        return EngineTrainerChecked(
            num_tokens=difference.num_tokens,
            diff_mean=difference.mean,
            diff_max=difference.max,
            bound_max=BOUND_MAX[self.plan.precision],
        )

    async def _sampled(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        recipe = self.recipe
        sessions = [
            RecordingSession(
                self.devices.engines,
                prompt_index=prompt.index,
                seed=recipe.run.seed + index,
                settings=GenerateRequest(
                    prompt_ids=(),
                    max_new_tokens=MAX_NEW_TOKENS,
                    temperature=recipe.rollout.temperature,
                    want_routed_experts=recipe.train.routing_replay,
                ),
                max_tokens=len(prompt.token_ids) + MAX_NEW_TOKENS,
                decode=lambda token_ids: "",
            )
            for index, prompt in enumerate(prompts)
        ]
        await asyncio.gather(
            *(
                session.generate(prompt.token_ids)
                for session, prompt in zip(sessions, prompts, strict=True)
            )
        )
        return [session.trajectories()[0] for session in sessions]

    async def _scored(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        recipe, plan = self.recipe, self.plan
        batch = pack(
            load_objective("supervised", recipe).sequences(trajectories),
            objective="supervised",
            dp=plan.trainer.dp,
            max_tokens_per_microbatch=plan.batch.max_row_tokens(plan.trainer.cp),
            temperature=recipe.rollout.temperature,
        )
        async with self.devices.scoring():
            return await self.devices.trainer.score(batch)

    def _is_fine(self, difference: Difference) -> bool:
        """False for NaN too."""
        precision = self.plan.precision
        return difference.max <= BOUND_MAX[precision] and difference.mean <= BOUND_MEAN[precision]

    async def _blame(self, prompts: Sequence[Prompt]) -> str:
        """What differs first: a weight, else a layer, found by silencing layers from the last to
        the first until both agree."""
        try:
            await self.devices.publish(self.devices.version, verify=True)
        except MismatchError as error:
            return f"the weights differ: {error.what} ({error.why})"
        for first in range(self.num_layers - 1, -1, -1):
            async with self.devices.training():
                await self.devices.trainer.silence_layers(first)
            await self.devices.publish(self.devices.version)
            trajectories = await self._sampled(prompts)
            if self._is_fine(compare(prompts, trajectories, await self._scored(trajectories))):
                return (
                    f"all weights are equal, and layer {first} (of {self.num_layers}, from 0) "
                    "is the first that computes otherwise"
                )
        return (
            "all weights are equal, and the difference is there without any layer: embedding, "
            "final norm or output layer"
        )

    def _mismatch(self, difference: Difference, where: str) -> MismatchError:
        precision = self.plan.precision
        return MismatchError(
            f"engine and trainer disagree: log-probs differ by {difference.max:.2e} at most and "
            f"{difference.mean:.2e} on average",
            why=f"{where}; {precision} allows {BOUND_MAX[precision]:.0e} and "
            f"{BOUND_MEAN[precision]:.0e}; worst at token "
            f"{difference.worst_position} of the response to prompt {difference.worst_prompt}, of "
            f"{difference.num_tokens} tokens",
            fix=[
                "miles doctor",
                "compare config.json of the model with what logs/latest/engine-0-server.log says",
            ],
        )


def compare(
    prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], scored: Sequence[np.ndarray]
) -> Difference:
    """`scored`: per trajectory, [num_tokens] the trainer's log-probs; the engine's are in the
    trajectories. NaN counts as the worst."""
    gaps, places = [], []
    for prompt, trajectory, logprobs in zip(prompts, trajectories, scored, strict=True):
        tokens = np.flatnonzero(np.frombuffer(trajectory.loss_mask, np.bool_))
        engine = np.frombuffer(trajectory.logprobs, np.float32)
        gaps.append(np.abs(logprobs[tokens].astype(np.float64) - engine[tokens]))
        places += [(prompt.index, int(token)) for token in tokens - tokens[0]]
    gap = np.concatenate(gaps)
    worst = int(np.argmax(np.where(np.isnan(gap), np.inf, gap)))
    return Difference(
        mean=float(gap.mean()),
        max=float(gap[worst]),
        num_tokens=len(gap),
        worst_prompt=places[worst][0],
        worst_position=places[worst][1],
    )
