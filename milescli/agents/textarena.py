"""Implements `rollout.environment.name=textarena`: games for one player of the package `textarena`,
such as GuessTheNumber and Sokoban."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milescli.agents.extras import require_package
from milescli.rollout.environments import Step


class TextArenaGame:
    """Plays a game of `textarena` for one player. Implements
    milescli.rollout.environments.Environment."""

    reward_range = (-1.0, 1.0)

    @staticmethod
    def require(settings: Mapping[str, Any]) -> None:
        """Raise MachineError if the package is not installed."""
        require_package("textarena", needed_by="the environment `textarena`")

    def __init__(self, *, id: str, **options: Any) -> None:
        """Make the game `id` with `options` by `textarena.make`. Raises ValueError for a game of
        several players, and what the package raises."""
        import textarena

        self._make = lambda: textarena.make(env_id=id, **options)
        self._game = self._make()
        self._id = id

    def reset(self, *, prompt: str, label: str | None, seed: int) -> str | None:
        """Start a new game, and return its rules. Raises ValueError if it needs several players."""
        self._game = self._make()  # some keep what was said in the game before
        try:
            self._game.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise ValueError(f"{self._id} is not a single-player game: {error}") from None
        return self._new_text()

    def step(self, action: str) -> Step:
        """Play one action. Only the last step has a reward."""
        ended, _ = self._game.step(action=action)
        if not ended:
            return Step(observation=self._new_text())
        rewards, _ = self._game.close()
        return Step(reward=float((rewards or {}).get(0, 0.0)), ended=True)

    def _new_text(self) -> str:
        """Return the game's output since the player's last turn."""
        _, observation = self._game.get_observation()
        text = observation if isinstance(observation, str) else str(observation)
        return text.strip() or "(nothing)"
