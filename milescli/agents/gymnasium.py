"""Implements `rollout.environment.name=gymnasium`: environments of the package `gymnasium` whose
states have a text form, such as FrozenLake and Taxi."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from milescli.agents.extras import require_package
from milescli.rollout.environments import Step

_SHOWN_IN_COLOUR = re.compile(r"\x1b\[[0-9;]*m(.+?)\x1b\[0m")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
MAX_ACTIONS = 64
"""Largest number of actions that can be listed for a model."""


class GymnasiumText:
    """Wraps an environment of `gymnasium` whose states have a text form. Implements
    milescli.rollout.environments.Environment."""

    reward_range = None

    @staticmethod
    def require(settings: Mapping[str, Any]) -> None:
        """Raise MachineError if the package is not installed."""
        require_package("gymnasium", needed_by="the environment `gymnasium`")

    def __init__(
        self,
        *,
        id: str,
        actions: Sequence[str] = (),
        instructions: str = "",
        **options: Any,
    ) -> None:
        """Make the environment `id` with `options` by `gymnasium.make`. `actions` is a word for
        each number of its discrete action space, by default the numbers themselves; `instructions`
        precede the first observation. Raises ValueError if its actions are not discrete, or differ
        in number."""
        import gymnasium

        spec = gymnasium.spec(id)
        can_draw = "ansi" in _render_modes(spec)
        self._environment = gymnasium.make(id, render_mode="ansi" if can_draw else None, **options)
        self._draws, self._num_unclear = can_draw, 0
        space = self._environment.action_space
        if not isinstance(space, gymnasium.spaces.Discrete) or space.n > MAX_ACTIONS:
            raise ValueError(f"the actions of {id} are {space}, which cannot be named one by one")
        first = int(space.start)
        names = list(actions) or [str(first + number) for number in range(int(space.n))]
        if len(names) != int(space.n):
            raise ValueError(f"{id} has {space.n} actions, but {len(names)} words were given")
        self._numbers = {name.lower(): first + place for place, name in enumerate(names)}
        self._instructions = instructions or f"Say one of: {', '.join(names)}."

    def reset(self, *, prompt: str, label: str | None, seed: int) -> str | None:
        """Start an episode; equal seeds start equally."""
        observation, _ = self._environment.reset(seed=seed)
        self._num_unclear = 0
        return f"{self._instructions}\n{self._shown(observation)}"

    def step(self, action: str) -> Step:
        """Take the action that the last matching word names. If no word matches, nothing happens,
        and the observation lists the words that the model may say."""
        words = re.findall(r"[\w-]+", action.lower())
        named = next((word for word in reversed(words) if word in self._numbers), None)
        if named is None:
            self._num_unclear += 1
            reminder = f"Say one of: {', '.join(self._numbers)}."
            return Step(observation=reminder, figures={"not_understood": self._num_unclear})
        observation, reward, ended, is_cut, _ = self._environment.step(self._numbers[named])
        return Step(
            observation=self._shown(observation),
            reward=float(reward),
            ended=bool(ended or is_cut),
        )

    def close(self) -> None:
        """Release what the environment holds."""
        self._environment.close()

    def _shown(self, observation: Any) -> str:
        """Return the environment's text rendering, with coloured cells in brackets; without one,
        the observation itself."""
        if not self._draws:
            return str(observation)
        drawn = str(self._environment.render())
        return _COLOUR.sub("", _SHOWN_IN_COLOUR.sub(r"[\1]", drawn)).strip("\n")


def _render_modes(spec: Any) -> Sequence[str]:
    import gymnasium.envs.registration as registration

    made_by = spec.entry_point
    factory = registration.load_env_creator(made_by) if isinstance(made_by, str) else made_by
    return (getattr(factory, "metadata", None) or {}).get("render_modes", ())
