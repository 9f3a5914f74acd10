"""Does the engine compute what the trainer computes? Asked before the first step of every run; a
run on wrong engines never starts."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from milescli.core.errors import MismatchError
from milescli.core.events import EngineTrainerChecked
from milescli.core.types import Group, Prompt, Sample
from milescli.plan.types import Plan
from milescli.rollout.base import Completion, GenerateRequest
from milescli.runtime.devices import Devices
from milescli.train import packing

NUM_PROMPTS = 8
MAX_NEW_TOKENS = 32
BOUND_MAX = {"fp32": 1e-4, "bf16": 0.5}
"""Largest |engine - trainer| log-prob that rounding explains, per token. fp32: 1e-6 to 5e-5 were
seen on CPU. bf16: not measured; kernels differ, and single tokens of small probability stray far
(the mean is what tells)."""
BOUND_MEAN = {"fp32": 1e-5, "bf16": 0.03}


class LayerSilencer(Protocol):
    """What finding the layer asks of the trainer."""

    async def silence_layers(self, first: int) -> None:
        """Make layers `first` and beyond pass their input through; the weights are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """|engine - trainer| over the sampled tokens."""

    mean: float
    max: float
    num_tokens: int
    worst_prompt: int
    worst_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Everything that the question needs."""

    devices: Devices
    """Engines and trainer, with equal weights; they take turns where they share devices."""
    silencer: LayerSilencer
    """The same trainer."""
    plan: Plan
    num_layers: int
    temperature: float
    seed: int
    routing_replay: bool

    async def run(self, prompts: Sequence[Prompt]) -> EngineTrainerChecked:
        """Let the engine answer the prompts and the trainer score the answers. Both hold the same
        weights afterwards, and the engines answer.

        Raises MismatchError beyond the precision's bound; it says by how much, and which weight or
        layer is the first to differ.
        """
        groups = await self._answers(prompts)
        difference = compare(groups, await self._scored(groups))
        if not self._is_fine(difference):
            raise self._mismatch(difference, await self._blame(groups))
        if self.devices.engines_asleep:
            await self.devices.publish(self.devices.version)
        return EngineTrainerChecked(
            num_tokens=difference.num_tokens,
            diff_mean=difference.mean,
            diff_max=difference.max,
            bound_max=BOUND_MAX[self.plan.precision],
        )

    async def _answers(self, prompts: Sequence[Prompt]) -> list[Group]:
        requests = [
            GenerateRequest(
                prompt_ids=prompt.token_ids,
                max_new_tokens=MAX_NEW_TOKENS,
                temperature=self.temperature,
                seed=self.seed + index,
                want_routed_experts=self.routing_replay,
            )
            for index, prompt in enumerate(prompts)
        ]
        completions = await asyncio.gather(
            *(self.devices.engines.generate(request) for request in requests)
        )
        return [
            _as_group(prompt, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    async def _scored(self, groups: list[Group]) -> list[array[float]]:
        batch = packing.pack_policy(
            groups,
            [[0.0] for _ in groups],
            dp=self.plan.trainer.dp,
            max_tokens_per_microbatch=self.plan.batch.max_row_tokens(self.plan.trainer.cp),
            updates=1,
            aggregation="token_mean",
            temperature=self.temperature,
            routing_replay=self.routing_replay,
        )
        async with self.devices.training():
            return await self.devices.trainer.logprobs(batch)

    def _is_fine(self, difference: Difference) -> bool:
        """False for NaN too."""
        precision = self.plan.precision
        return difference.max <= BOUND_MAX[precision] and difference.mean <= BOUND_MEAN[precision]

    async def _blame(self, groups: list[Group]) -> str:
        """What differs first: a weight, else a layer, found by silencing layers from the last to
        the first until both agree."""
        try:
            await self.devices.publish(self.devices.version, verify=True)
        except MismatchError as error:
            return f"the weights differ: {error.what} ({error.why})"
        prompts = [group.prompt for group in groups]
        for first in range(self.num_layers - 1, -1, -1):
            async with self.devices.training():
                await self.silencer.silence_layers(first)
            await self.devices.publish(self.devices.version)
            left = await self._answers(prompts)
            if self._is_fine(compare(left, await self._scored(left))):
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
            f"{difference.worst_position} of the answer to prompt {difference.worst_prompt}, of "
            f"{difference.num_tokens} tokens",
            fix=[
                "miles doctor",
                "compare config.json of the model with what logs/latest/engine-0-server.log says",
            ],
        )


def compare(groups: list[Group], scored: list[array[float]]) -> Difference:
    """`scored`: per sequence, [positions] the trainer's log-probs; the engine's are in the samples.
    NaN counts as the worst."""
    worst, total, count, place = -1.0, 0.0, 0, (0, 0)
    for group, trainer_logprobs in zip(groups, scored, strict=True):
        sample = group.samples[0]
        answer = trainer_logprobs[len(sample.prompt_ids) - 1 :]
        for position, (ours, theirs) in enumerate(zip(answer, sample.logprobs, strict=True)):
            gap = abs(ours - theirs)
            total, count = total + gap, count + 1
            if not gap <= worst:
                worst, place = gap, (group.prompt.index, position)
    return Difference(
        mean=total / max(count, 1),
        max=worst,
        num_tokens=count,
        worst_prompt=place[0],
        worst_position=place[1],
    )


def _as_group(prompt: Prompt, completion: Completion) -> Group:
    sample = Sample(
        sample_index=0,
        seed=0,
        prompt_ids=prompt.token_ids,
        response_ids=completion.response_ids,
        logprobs=completion.logprobs,
        loss_mask=[True] * len(completion.response_ids),
        text="",
        stop_reason=completion.stop_reason,
        version_spans=completion.version_spans,
        reward=0.0,
        routed_experts=completion.routed_experts,
    )
    return Group(prompt=prompt, samples=[sample])
