"""Aggregates the samples of an evaluation: metrics with confidence intervals over all prompts, and
the accuracy per domain. Pure; `miles eval` calls it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from milescli.core.types import Group
from milescli.rollout.evaluation.statistics import Estimate, estimate_mean, majority_at, pass_at

Answer = Callable[[str], str | None]
"""Returns the answer that a response states; None: it states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainScore:
    """Holds the score of the prompts of one domain."""

    num_prompts: int
    accuracy: Estimate
    """Mean reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Holds the scores of one set of prompts."""

    samples_per_prompt: int
    """Number of samples of the prompt that has the fewest."""
    estimates: Mapping[str, Estimate]
    """avg@n, the mean reward; pass@k, one of k samples is right (reward above 0); maj@k, the most
    frequent answer of k samples is right, if the reward can extract answers."""
    domains: Mapping[str, DomainScore] = field(default_factory=dict)
    """Scores by domain, in alphabetical order; empty if the prompts have none."""


def scores_of(
    groups: Sequence[Group],
    *,
    ks: Sequence[int],
    answer: Answer | None = None,
    domains: Mapping[int, str] | None = None,
) -> Scores:
    """Compute the scores. A k above the samples of the prompt that has the fewest is left out.
    `domains` maps the index of a prompt to its domain."""
    rewards = {group.prompt.index: fmean(group.rewards) for group in groups}
    fewest = fewest_samples(groups)
    ks = [k for k in ks if k <= fewest]
    per_prompt: dict[str, list[float]] = {f"avg@{fewest}": list(rewards.values())}
    for k in ks:
        per_prompt[f"pass@{k}"] = [_pass_at(k, group) for group in groups]
    for k in ks if answer else ():
        if k > 1:
            per_prompt[f"maj@{k}"] = [_majority_at(k, group, answer) for group in groups]
    named = domains or {}
    by_domain: dict[str, list[float]] = {name: [] for name in sorted(set(named.values()))}
    for index, reward in rewards.items():
        if index in named:
            by_domain[named[index]].append(reward)
    return Scores(
        samples_per_prompt=fewest,
        estimates={
            name: estimate_mean(values, samples_per_prompt=fewest)
            for name, values in per_prompt.items()
        },
        domains={
            name: DomainScore(
                num_prompts=len(values), accuracy=estimate_mean(values, samples_per_prompt=fewest)
            )
            for name, values in by_domain.items()
            if values
        },
    )


def fewest_samples(groups: Sequence[Group]) -> int:
    """Return the number of samples of the prompt that has the fewest: pass@k of all prompts needs
    k of each, and an evaluation function may return any number."""
    return min(len(group.samples) for group in groups)


def is_right(reward: float) -> bool:
    """Return True if pass@k and maj@k count the reward as correct."""
    return reward > 0


def _pass_at(k: int, group: Group) -> float:
    right = sum(map(is_right, group.rewards))
    return pass_at(k, num_samples=len(group.rewards), num_right=right)


def _majority_at(k: int, group: Group, answer: Answer) -> float:
    """Compute maj@k; all right samples count as one answer, however they write it."""
    wrong = Counter(
        answer(sample.text)
        for sample, reward in zip(group.samples, group.rewards, strict=True)
        if not is_right(reward)
    )
    silent = wrong.pop(None, 0)
    right = len(group.samples) - silent - sum(wrong.values())
    return majority_at(k, num_right=right, wrong=list(wrong.values()), num_silent=silent)
