"""Environments of a user's, good and bad."""

from __future__ import annotations

import io
import os
import time
from dataclasses import replace
from pathlib import Path

from PIL import Image as Pillow

from milescli.rollout.environments import Step


class Count:
    """Says how many actions there were; ends after `length`; each action is worth its length."""

    reward_range = None

    def __init__(self, *, length: int = 3) -> None:
        self.length, self.said = length, list[str]()

    def reset(self, *, prompt: str, label: str | None, seed: int) -> str | None:
        """Shows the seed."""
        self.said = []
        return f"begin {seed}"

    def step(self, action: str) -> Step:
        """All that was said so far."""
        self.said.append(action)
        return Step(
            observation=" ".join(self.said),
            reward=float(len(action)),
            ended=len(self.said) >= self.length,
            figures={"said": float(len(self.said))},
        )


class Pictures(Count):
    """Shows a picture, of which a file is cut off where it is told to."""

    def reset(self, *, prompt: str, label: str | None, seed: int) -> object:
        """A picture alone."""
        super().reset(prompt=prompt, label=label, seed=seed)
        return Pillow.new("RGB", (8, 8), "red")

    def step(self, action: str) -> Step:
        """Text, and the bytes of a file."""
        Pillow.new("RGB", (8, 8), "blue").save(file := io.BytesIO(), format="PNG")
        step = super().step(action)
        seen = [step.observation, file.getvalue()[: 40 if action == "cut" else None]]
        return replace(step, observation=seen)


class Looks(Count):
    """Keeps the prompt, and shows another picture behind each action."""

    def reset(self, *, prompt: str, label: str | None, seed: int) -> None:
        """The prompt itself."""
        super().reset(prompt=prompt, label=label, seed=seed)

    def step(self, action: str) -> Step:
        """A picture alone, whose colour is new."""
        step = super().step(action)
        red = 40 * len(self.said) + len(action)
        return replace(step, observation=Pillow.new("RGB", (16, 16), (red, 90, 90)))


class Hangs(Count):
    """For ever where it is told to, and without end where others play."""

    def step(self, action: str) -> Step:
        """See the class."""
        if action == "hang":
            hang_here()
        return super().step(action)


def hang_here() -> None:
    """By name in errors."""
    while True:
        time.sleep(0.05)


class Dies(Count):
    """Takes its process with it, once for each file that it is given."""

    def __init__(self, *, once: str) -> None:
        super().__init__()
        self.once = Path(once)

    def step(self, action: str) -> Step:
        """See the class."""
        if action == "die" and not self.once.exists():
            self.once.touch()
            os._exit(9)
        return super().step(action)


class Wrong(Count):
    """Gives what is no step."""

    def step(self, action: str) -> Step:
        """By what it is told."""
        wrong = {
            "none": None,
            "tuple": ("text", 1.0, True, False, {}),
            "nan": Step(reward=float("nan")),
            "bytes": Step(observation=b"x"),  # type: ignore[arg-type]
            "text": Step(reward="1"),  # type: ignore[arg-type]
        }
        if action == "raise":
            raise ZeroDivisionError("of the environment")
        return wrong[action]  # type: ignore[return-value]


class Forgets(Count):
    """Is not the same for the same seed."""

    def reset(self, *, prompt: str, label: str | None, seed: int) -> str | None:
        """Another each time."""
        return f"{super().reset(prompt=prompt, label=label, seed=seed)} {time.perf_counter_ns()}"


class Leaks(Count):
    """Opens a file in each episode."""

    opened: list[object] = []  # noqa: RUF012 - kept on purpose

    def reset(self, *, prompt: str, label: str | None, seed: int) -> str | None:
        """See the class."""
        self.opened.append(open(__file__))  # noqa: SIM115 - kept on purpose
        return super().reset(prompt=prompt, label=label, seed=seed)


class Rich(Count):
    """Is worth more than it says."""

    reward_range = (0.0, 0.5)
