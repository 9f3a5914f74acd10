"""Chooses the samples of a report: the best and the worst of the group whose rewards differ most,
of the first, a middle and the last step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from milescli.checkpoint.run_dir import RunDir
from milescli.core.private import without_private
from milescli.insight.samples import (
    KeptSample,
    by_group,
    images_in,
    read_samples,
    sample_steps,
)

MAX_CHARACTERS = 2000
"""Longest prompt or response to show, in characters; the middle of a longer one is omitted."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
"""Characters that no page should contain; they are shown as the replacement character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """Holds one sample as a report shows it."""

    word: str
    """best, worst, or sample if all are equal."""
    reward: float | None
    stop_reason: str
    text: str
    returned_images: Sequence[str] = ()
    """Hashes of the pictures that its tools returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """Holds the best and the worst sample of one group of a step."""

    step: int
    prompt_index: int
    prompt: str
    images: Sequence[str]
    """Hashes of the pictures in the prompt."""
    label: str
    """Empty if unknown."""
    rewards: Sequence[float]
    """Rewards of all stored samples of the group."""
    samples: Sequence[ShownSample]


def choose_steps(run: RunDir) -> list[ShownStep]:
    """Choose samples of the first, a middle and the last step; none if none were stored."""
    steps = sample_steps(run)
    places = sorted({0, len(steps) // 2, len(steps) - 1}) if steps else []
    shown = (_of_step(steps[place], read_samples(run, steps[place])) for place in places)
    return [one for one in shown if one is not None]


def _of_step(step: int, samples: Sequence[KeptSample]) -> ShownStep | None:
    groups = by_group(samples)
    if not groups:
        return None
    group = max(groups, key=_spread)
    scored = [sample for sample in group if sample.reward is not None] or group
    best, worst = max(scored, key=_reward), min(scored, key=_reward)
    chosen = (
        [("best", best), ("worst", worst)] if _reward(best) > _reward(worst) else [("sample", best)]
    )
    label = group[0].record.get("label")
    return ShownStep(
        step=step,
        prompt_index=group[0].prompt_index,
        prompt=shown_text(group[0].prompt),
        images=images_in(group[0].record),
        label="" if label is None else shown_text(str(label)),
        rewards=[_reward(sample) for sample in group if sample.reward is not None],
        samples=[
            ShownSample(
                word=word,
                reward=sample.reward,
                stop_reason=sample.stop_reason,
                text=shown_text(sample.response),
                returned_images=images_in(sample.record, "returned_images"),
            )
            for word, sample in chosen
        ],
    )


def _reward(sample: KeptSample) -> float:
    return float(sample.reward or 0.0)


def _spread(group: Sequence[KeptSample]) -> float:
    rewards = [_reward(sample) for sample in group]
    return max(rewards) - min(rewards)


def shown_text(text: str) -> str:
    """Return the text without tokens, home folders and control characters, and not too long."""
    text = _CONTROL.sub("\ufffd", without_private(text))
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out:,} characters omitted ...]\n{text[-half:]}"
