"""Computes the metrics of one step's collecting (RolloutStats). Pure; the collector calls it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, pstdev

from milescli.core.events import RolloutStats
from milescli.core.types import (
    NO_GUESSES,
    Group,
    RewardDetail,
    Sample,
    StopReason,
    WeightVersion,
)
from milescli.rollout.collect.selectors import has_zero_variance


def staleness_of(group: Group, version: WeightVersion) -> int:
    """Return the trainer version minus the version of the group's oldest token."""
    lines = [line for sample in group.samples for line in sample.trajectories]
    return version - min(span.version for line in lines for span in line.version_spans)


def summarise(
    *,
    kept: Sequence[Group],
    refused: Sequence[Group],
    version: WeightVersion,
    compared: Collection[RewardDetail] = (),
) -> RolloutStats:
    """Summarise a step. Counts and staleness cover the groups that are trained on; rewards,
    lengths, truncation and zero variance cover all generated groups, refused ones included, so that
    a filter does not distort the picture of the policy. `compared`: what the objective compares of
    rewards besides their sum."""
    assert kept, "a step without groups"
    seen = [*kept, *refused]
    samples = [sample for group in seen for sample in group.samples]
    rewards = [reward for group in seen for reward in group.rewards]
    lengths = [sample.num_loss_tokens for sample in samples]
    ages = [staleness_of(group, version) for group in kept]
    guesses = sum((one.guesses for one in samples if one.guesses.num_passes), NO_GUESSES)
    return RolloutStats(
        num_groups=len(kept),
        num_samples=sum(len(group.samples) for group in kept),
        reward_mean=fmean(rewards),
        reward_std=pstdev(rewards),
        zero_variance_fraction=fmean(has_zero_variance(group, compared) for group in seen),
        truncated_fraction=fmean(sample.stop_reason is StopReason.LENGTH for sample in samples),
        response_tokens_mean=fmean(lengths),
        response_tokens_max=max(lengths),
        prompt_tokens_mean=fmean(len(group.prompt.token_ids) for group in seen),
        staleness_mean=fmean(ages),
        staleness_max=max(ages),
        dropped_groups=len(refused),
        generated_tokens=sum(lengths),
        reward_parts=mean_parts(samples),
        figures=mean_figures(samples),
        accept_length=1 + guesses.num_right / guesses.num_passes if guesses.num_passes else None,
        accept_rate=guesses.num_right / guesses.num_guessed if guesses.num_guessed else None,
        reward_histogram=reward_histogram(seen),
    )


def reward_histogram(groups: Sequence[Group]) -> tuple[int, ...]:
    """Return [12] counts as in `RolloutStats.reward_histogram`."""
    if any(not 0 <= reward <= 1 for group in groups for reward in group.rewards):
        return ()
    counts = [0] * 12
    for group in groups:
        if len(same := set(group.rewards)) == 1 and (reward := same.pop()) in (0, 1):
            counts[11 * int(reward)] += 1
        else:  # rounded, so that no sum of tenths falls just below its own
            counts[1 + min(int(round(fmean(group.rewards), 9) * 10), 9)] += 1
    return tuple(counts)


def mean_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean of each part of the reward, over the samples with parts."""
    return _means([sample.reward_parts for sample in samples])


def mean_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean of each metric that agents report. If any episode failed, also
    `failed_episodes`: failed attempts per sample."""
    failed = fmean(sample.num_failed for sample in samples) if samples else 0.0
    figures = _means([sample.figures for sample in samples])
    return {**figures, "failed_episodes": failed} if failed else figures


def _means(mappings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name, over the mappings that have it."""
    names = dict.fromkeys(name for figures in mappings for name in figures)
    return {name: fmean(row[name] for row in mappings if name in row) for name in names}
