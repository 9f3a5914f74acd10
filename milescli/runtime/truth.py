"""Does the engine compute what the trainer computes? Asked before the first step of every run; a run on wrong engines never starts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from milescli.core.errors import MismatchError
from milescli.core.events import EngineTrainerChecked
from milescli.core.types import Group, Prompt, Sample
from milescli.plan.types import Plan
from milescli.rollout.base import Completion, GenerateRequest, RolloutEngine
from milescli.runtime.trainer import RankGroup
from milescli.train import packing

NUM_PROMPTS = 8
MAX_NEW_TOKENS = 32
BOUND_MAX = {"fp32": 1e-4, "bf16": 0.5}
"""Largest |engine - trainer| log-prob that rounding explains, per token. fp32: measured below 1e-5 on CPU; bf16: kernels differ, and
single tokens of small probability stray far (the mean is what tells)."""
BOUND_MEAN = {"fp32": 1e-5, "bf16": 0.03}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """|engine - trainer| over the sampled tokens."""

    mean: float
    max: float
    num_tokens: int
    worst_prompt: int
    worst_position: int


async def check(
    *, engine: RolloutEngine, trainer: RankGroup, prompts: list[Prompt], plan: Plan, temperature: float, seed: int, replay: bool
) -> EngineTrainerChecked:
    """Let the engine answer a few prompts and the trainer score the answers. Raises MismatchError beyond the precision's bound."""
    requests = [
        GenerateRequest(
            prompt_ids=prompt.token_ids,
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=temperature,
            seed=seed + index,
            want_routed_experts=replay,
        )
        for index, prompt in enumerate(prompts[:NUM_PROMPTS])
    ]
    completions = await asyncio.gather(*(engine.generate(request) for request in requests))
    groups = [_as_group(prompt, completion) for prompt, completion in zip(prompts, completions, strict=False)]
    batch = packing.pack_policy(
        groups,
        [[0.0] for _ in groups],
        dp=plan.trainer.dp,
        max_tokens_per_microbatch=plan.batch.max_tokens_per_microbatch,
        updates=1,
        aggregation="token_mean",
        temperature=temperature,
    )
    difference = _compare(groups, await trainer.logprobs(batch))
    bound_max, bound_mean = BOUND_MAX[plan.precision], BOUND_MEAN[plan.precision]
    if not (difference.max <= bound_max and difference.mean <= bound_mean):
        await _blame_weights(trainer, difference, plan)
        raise _mismatch(
            difference, plan, "every weight that the engine holds equals the trainer's, so the forward passes differ"
        )
    return EngineTrainerChecked(
        num_tokens=difference.num_tokens, diff_mean=difference.mean, diff_max=difference.max, bound_max=bound_max
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


def _compare(groups: list[Group], scored: list) -> Difference:
    worst, total, count, place = -1.0, 0.0, 0, (0, 0)
    for group, trainer_logprobs in zip(groups, scored, strict=True):
        sample = group.samples[0]
        answer = trainer_logprobs[len(sample.prompt_ids) - 1 :]
        for position, (ours, theirs) in enumerate(zip(answer, sample.logprobs, strict=True)):
            gap = abs(ours - theirs)
            total, count = total + gap, count + 1
            if not gap <= worst:  # also true for NaN, which is the worst of all
                worst, place = gap, (group.prompt.index, position)
    return Difference(mean=total / max(count, 1), max=worst, num_tokens=count, worst_prompt=place[0], worst_position=place[1])


async def _blame_weights(trainer: RankGroup, difference: Difference, plan: Plan) -> None:
    try:
        await trainer.verify()
    except MismatchError as error:
        raise _mismatch(difference, plan, f"the weights differ: {error.what} ({error.why})") from error


def _mismatch(difference: Difference, plan: Plan, where: str) -> MismatchError:
    return MismatchError(
        f"engine and trainer disagree: |log-prob difference| is {difference.max:.2e} at most and {difference.mean:.2e} on average",
        why=f"{plan.precision} allows {BOUND_MAX[plan.precision]:.0e} and {BOUND_MEAN[plan.precision]:.0e}; worst at token "
        f"{difference.worst_position} of the answer to prompt {difference.worst_prompt}, over {difference.num_tokens} tokens; {where}",
        fix=["miles doctor", "--set weights.verify=true   # compares all weights after each publish"],
    )
