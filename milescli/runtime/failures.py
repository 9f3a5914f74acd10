"""Episodes that failed and are played anew, as users are told of them: the first few with what went
wrong. The figure `failed_episodes` counts all. Called by `reinforcing` and `evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

NUM_TOLD = 3


@dataclass(slots=True)
class FirstFew:
    """Hands on the first `NUM_TOLD` texts."""

    say: Callable[[str], None]
    num_heard: int = 0

    def __call__(self, text: str) -> None:
        """One more."""
        self.num_heard += 1
        if self.num_heard <= NUM_TOLD:
            self.say(text + "; further ones are counted" * (self.num_heard == NUM_TOLD))
