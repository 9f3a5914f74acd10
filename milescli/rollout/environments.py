"""Defines environments: objects that respond to the policy's actions with observations and rewards.
This file has the protocol and loads environments by name; the agent that plays in an environment is
in `agents`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from milescli.core.errors import RecipeError
from milescli.core.plug_points import ENVIRONMENTS
from milescli.core.types import Prompt
from milescli.core.user_code import name_of
from milescli.data.images import Content, content_of
from milescli.recipe.agents import EnvironmentSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Holds the result of one turn of the policy."""

    observation: Any = ""
    """What the policy sees next, unless the episode has ended: text, an image (the bytes of a file,
    or a PIL image), or a list of both."""
    reward: float = 0.0
    """Reward of this turn. The reward of the episode is the sum over its turns."""
    ended: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the episode, by name; those of the last step count."""


class Environment(Protocol):
    """Responds to the policy's actions. Created with `rollout.environment.settings` as its
    arguments; one object plays one episode at a time, and may be reset many times. Its calls may
    block: each runs in a thread of its own, in a process that environments of the same kind share.
    Equal seeds and equal actions must give equal steps: if its process had to be ended, the episode
    is replayed to the same point. It may have a `close()`; a `reward_range: tuple[float, float] |
    None` of an episode, by default (0, 1), which `miles env check` verifies; and, on its class,
    `require(settings)`, which raises MilesError if it cannot work on this machine."""

    def reset(self, *, prompt: str, label: str | None, seed: int) -> Any:
        """Begin the episode of a row of the data, and return the observation that the policy sees
        in place of the row's prompt; None: the prompt itself. `seed`: the same for all samples of a
        row, and equal to its label if that is a whole number (`task:seeds`)."""
        ...

    def step(self, action: str) -> Step:
        """Act on `action`, the policy's output without its reasoning."""
        ...


def seed_of(prompt: Prompt) -> int:
    """Return the seed of the episodes that a row of the data starts."""
    label = prompt.label or ""
    return int(label) if label.isdecimal() and len(label) < 10 else prompt.index


def numbered_rows(count: int) -> list[Prompt]:
    """Return `count` prompts without text whose labels are 0, 1, ..., like those of
    `task:seeds`."""
    return [
        Prompt(index=number, token_ids=[], text="", label=str(number)) for number in range(count)
    ]


def create_environment(what: Any, settings: Mapping[str, Any]) -> Environment:
    """Create an environment from a name, an import path or a factory. Raises RecipeError if it
    cannot be loaded, or does not take the settings."""
    factory: Any = ENVIRONMENTS.resolve(what) if isinstance(what, str) else what
    called = what if isinstance(what, str) else name_of(what)
    try:
        inspect.signature(factory).bind(**settings)
    except TypeError as error:
        takes = ", ".join(inspect.signature(factory).parameters)
        raise RecipeError(
            f"the environment `{called}` does not accept its settings",
            why=f"{error}; it takes ({takes})",
            fix="--set 'rollout.environment.settings={}'   # plus the arguments that it needs",
        ) from None
    environment: Environment = factory(**settings)
    if lacking := [name for name in ("reset", "step") if not hasattr(environment, name)]:
        raise RecipeError(
            f"`{called}` does not create an environment",
            why=f"it returns {type(environment).__name__}, which has no {' and no '.join(lacking)}",
            fix="miles plugins new environment my_game   # writes a template",
        )
    return environment


def require_environment(settings: EnvironmentSettings) -> None:
    """Load the named environment, and raise MilesError if it cannot work on this machine."""
    assert settings.name is not None, "the recipe's check asks for a name"
    require(ENVIRONMENTS.resolve(settings.name), settings.settings)


def require(factory: Any, settings: Mapping[str, Any]) -> None:
    """Raise MilesError if the factory's environments cannot work on this machine."""
    if (check := getattr(factory, "require", None)) is not None:
        check(settings)


def checked_step(step: object) -> Step:
    """Return the step with its observation as the content of a message, with images. Raises
    ValueError if it is not a Step."""
    if not isinstance(step, Step):
        raise ValueError(f"`step` returned {step!r:.200}, not a Step")
    if (content := content_of(step.observation)) is None:
        raise ValueError(
            f"the observation of a step is {step.observation!r:.200}, not text or an image"
        )
    numbers = {"reward": step.reward, **step.figures}
    for name, value in numbers.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ValueError(f"the {name} of a step is {value!r:.80}, not a finite number")
    return replace(step, observation=content)


def checked_start(observation: object) -> Content | None:
    """Return an observation as the content of a message. Raises ValueError for anything that
    `reset` may not return."""
    if observation is None:
        return None
    if (content := content_of(observation)) is None:
        raise ValueError(f"`reset` returned {observation!r:.200}, not text, an image or None")
    return content
