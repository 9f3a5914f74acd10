"""Plug-ins of a user, one of each kind that a run calls beside its reward; those that only look say
so in a file."""

from __future__ import annotations

import os
from statistics import fmean
from typing import Any


def _say(*words: object) -> None:
    with open(os.environ["MILES_TEST_TOLD"], "a") as file:
        print(*words, file=file)


async def twice(*, token_ids: Any, generate: Any, settings: Any) -> Any:
    """The second of two responses."""
    await generate(token_ids, max_new_tokens=1)
    return await generate(token_ids)


def last(*, groups: Any, count: int, settings: Any) -> Any:
    """Of those that over-sampling began."""
    return range(len(groups) - count, len(groups))


def hardest(*, candidates: Any, history: Any, count: int, settings: Any) -> Any:
    """The lowest reward first; says how many it knows."""
    _say("knows", len(history))
    known = {index: tried.reward for index, tried in history.items()}
    return sorted(range(len(candidates)), key=lambda n: known.get(candidates[n].index, 0.5))[:count]


def looking(*, model: Any, stream: str) -> None:
    """At each rank."""
    _say("log-probs", stream, sum(weight.numel() for weight in model.parameters()))


def layers(*, spec: Any, config: Any, facts: Any, layer: int) -> Any:
    """As it is."""
    _say("layer", layer)
    return spec


async def both(*, prompts: Any, play: Any, settings: Any) -> Any:
    """Two attempts at each prompt."""
    return [[await play(place), await play(place, 1)] for place in range(len(prompts))]


def copied(*, name: str, tensor: Any) -> Any:
    """A tensor of its own."""
    return [(name, tensor.clone())]


def all_samples(*, step: int, groups: Any, refused: Any) -> None:
    """Says how many there were."""
    _say("step", step, len(groups), len(refused))


def hard(*, group: Any, settings: Any) -> bool:
    """Refuses what is answered well."""
    return fmean(group.rewards) < 0.95


def by_length(*, prompt: str, responses: list[str], label: str | None) -> list[float]:
    """Compares the responses of a group."""
    longest = max(map(len, responses)) or 1
    return [len(text) / longest for text in responses]
