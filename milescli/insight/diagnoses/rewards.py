"""Diagnoses of the reward: flat, falling, equal within groups, or hacked."""

from __future__ import annotations

import math

import numpy as np

from milescli.insight import series
from milescli.insight.case import (
    CEILING,
    REWARD,
    Case,
    Finding,
    Level,
    difference,
    number,
    surest_trend,
)

ZERO_VARIANCE = "rollout/zero_variance_fraction"
EQUAL = 0.8
"""Share of groups with equal rewards that leaves too little to learn from."""
ENOUGH = 20
"""Steps after which a reward that has not risen is called flat."""
_DAPO = "Yu et al. (DAPO), arXiv 2503.14476, section 3.2: groups of equal rewards have no gradient"


def groups_too_hard(case: Case) -> Finding | None:
    """Detect that nearly all groups have equal and low rewards."""
    if not _are_equal(case) or case.recent(REWARD) > 0.5 * CEILING:
        return None
    return case.finding(
        "groups-too-hard",
        Level.BAD,
        "Rewards are equal within nearly all groups: too hard",
        evidence=_equal_evidence(case),
        advice=(
            "easier prompts, or a warm-up on demonstrations: --set warmup.steps=...",
            "more samples a prompt, so that one is right now and then: "
            "--set rollout.samples_per_prompt=16",
            "check the reward: read samples, because a correct answer in a form that the reward "
            "does not accept scores 0",
            "--set rollout.filter=zero_variance skips such groups and samples others",
        ),
        source=_DAPO,
        columns=(ZERO_VARIANCE, REWARD),
    )


def groups_too_easy(case: Case) -> Finding | None:
    """Detect that nearly all groups have equal and high rewards: from the start, or after the run
    has learned its prompts."""
    if not _are_equal(case) or case.recent(REWARD) <= 0.5 * CEILING:
        return None
    has_learned = case.is_rising and case.is_at_ceiling
    return case.finding(
        "groups-too-easy",
        Level.HINT if has_learned else Level.WARNING,
        "It has learned what these prompts teach"
        if has_learned
        else "Rewards are equal within nearly all groups: too easy",
        evidence=_equal_evidence(case),
        advice=(
            "stop here and export, or continue with harder prompts"
            if has_learned
            else "harder prompts, or a curriculum: --set data.curriculum=...",
            "--set rollout.filter=zero_variance skips such groups and samples others",
        ),
        source=_DAPO,
        columns=(ZERO_VARIANCE, REWARD),
    )


def reward_falling(case: Case) -> Finding | None:
    """Detect that the reward is lower than before by more than noise: compared with its best
    window, or with the first step."""
    rewards = series.finite(case.column(REWARD))
    if len(rewards) < ENOUGH:
        return None
    half = rewards[len(rewards) // 2 :]
    best, now = _best_window(rewards), series.recent(rewards)
    lost, noise = best - now.mean(), _noise(rewards)
    is_falling = series.trend(half).is_falling or now.mean() < series.early(rewards).mean()
    if not is_falling or lost < 5 * noise / math.sqrt(len(now)) or lost < 0.1 * max(1e-9, best):
        if not _is_lost_at_once(case, rewards):
            return None
        best = float(rewards[0])
    return case.finding(
        "reward-falling",
        Level.BAD,
        "The reward falls",
        evidence=f"the mean reward peaked at {number(best)} and is {number(now.mean())} over the "
        f"last {len(now)} steps",
        advice=(
            "go back to a checkpoint before the fall, with a lower learning rate: miles fork RUN "
            "--step N --set train.optimizer.lr=...",
            "a KL to the reference in a new run: --set train.kl_coef=0.001",
            "find what changed first: see entropy, |engine - trainer| and response length",
        ),
        source="a window's mean against the best window's, over five standard errors of its noise",
        columns=(REWARD, "train/entropy", "train/logprob_diff_mean"),
    )


def reward_flat(case: Case) -> Finding | None:
    """Detect a reward that does not rise by more than noise, although there is something left to
    gain."""
    if case.history.learns_from_rows or not case.has(REWARD, least=ENOUGH):
        return None
    trend = case.progress
    if case.is_early(least=ENOUGH) or case.is_rising or case.is_at_ceiling or trend.is_falling:
        return None
    return case.finding(
        "reward-flat",
        Level.WARNING,
        "The reward is flat",
        evidence=f"the mean reward went from {number(case.early(REWARD))} to "
        f"{number(case.recent(REWARD))} over {case.num_steps} steps: a change of "
        f"{number(trend.change, '+.3g')} with a standard error of {number(trend.error)}",
        advice=(
            "check whether another finding is the cause: those above this one come first",
            "raise train.optimizer.lr (three times as much), or sample more responses per prompt",
            "read samples: does the reward measure what you want?",
        ),
        source="Newey and West, Econometrica 55 (1987), 703: the line's slope against its error",
        columns=(REWARD,),
        steps=case.steps,
    )


def held_out_falls(case: Case) -> Finding | None:
    """Detect over-optimisation of the reward: training reward rises while held-out accuracy
    falls."""
    found = case.history.evaluations
    if len(found) < 3 or not case.has(REWARD):
        return None
    best = max(found[:-1], key=lambda one: one.accuracy)
    last = found[-1]
    fall = difference(best.accuracy, last.accuracy, num_prompts=last.num_prompts)
    steps = np.asarray(case.history.columns.steps)
    since = surest_trend(case.column(REWARD)[steps > best.step])
    if not fall.is_falling or since.is_falling or math.isnan(since.change):
        return None
    return case.finding(
        "held-out-falls",
        Level.BAD,
        "Reward rises, held-out accuracy falls",
        evidence=f"held-out accuracy fell from {number(best.accuracy)} at step {best.step} to "
        f"{number(last.accuracy)} at step {last.step} ({last.num_prompts} prompts), while the "
        f"training reward changed by {number(since.change, '+.3g')}",
        advice=(
            f"use the weights of step {best.step}: miles export RUN --step {best.step} --to DIR",
            "read the samples with the highest rewards: what does the reward pay for?",
            "--set train.kl_coef=0.001 keeps the policy near its reference; more and different "
            "prompts also help",
        ),
        source="Gao et al., arXiv 2210.10760: over-optimisation of a proxy reward",
        columns=(REWARD, "eval/accuracy"),
        steps=(best.step, last.step),
    )


def _are_equal(case: Case) -> bool:
    return case.has(ZERO_VARIANCE, least=series.MIN_WINDOW) and case.recent(ZERO_VARIANCE) >= EQUAL


def _equal_evidence(case: Case) -> str:
    text = (
        f"{case.recent(ZERO_VARIANCE):.0%} of the groups of the last steps have equal rewards, "
        f"mean {number(case.recent(REWARD))}"
    )
    histograms = [counts for _, counts in case.history.reward_histograms[-series.MIN_WINDOW :]]
    if not histograms:
        return text
    sums = np.sum(histograms, axis=0)
    between = int(sums[1:-1].sum())
    return (
        f"{text}; of {int(sums.sum())} groups, {int(sums[0])} have a mean reward of 0, {between} "
        f"one in between, {int(sums[-1])} one of 1"
    )


def _best_window(rewards: np.ndarray) -> float:
    length = len(series.recent(rewards))
    sums = np.convolve(rewards, np.ones(length), mode="valid")
    return float(sums.max()) / length


def _is_lost_at_once(case: Case, rewards: np.ndarray) -> bool:
    """Return True if the first updates destroyed the model: less than half of the first step's
    reward is left, by more than the noise of its groups."""
    now, first = float(series.recent(rewards).mean()), float(rewards[0])
    groups = max(1.0, float(case.column("rollout/num_groups")[0]))
    error = float(case.column("rollout/reward_std")[0]) / math.sqrt(groups)
    return now < 0.5 * first and first - now > series.MIN_STANDARD_ERRORS * error


def _noise(rewards: np.ndarray) -> float:
    return float(np.sqrt((np.diff(rewards) ** 2).mean() / 2)) if len(rewards) > 1 else 0.0


ALL = (groups_too_hard, groups_too_easy, reward_falling, held_out_falls, reward_flat)
