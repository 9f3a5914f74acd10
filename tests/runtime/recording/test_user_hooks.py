"""Functions of the user's that are told what a run does."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from milescli.core.errors import RecipeError
from milescli.core.events import EvalDone, PhaseStarted
from milescli.recipe.machine import HookSettings, RunSettings
from milescli.recipe.schema import Recipe
from milescli.runtime.recording.user_hooks import UserHooks
from milescli.workers.isolated import close_lanes

TOLD = "MILES_TEST_TOLD"
"""A file; hooks run in another process."""


def before(*, step: int, groups: list[Any]) -> None:
    """Remembers."""
    with open(os.environ[TOLD], "a") as file:
        print(json.dumps((step, groups)), file=file)


def tracker(*, step: int, scalars: dict[str, float]) -> None:
    """Remembers."""
    before(step=step, groups=scalars)


def raising(*, step: int, groups: list[Any]) -> None:
    """Its author's mistake."""
    raise KeyError("difficulty")


def hanging(*, step: int, groups: list[Any]) -> None:
    """Longer than it may."""
    time.sleep(600)


def leaving(*, step: int, groups: list[Any]) -> None:
    """Politely."""
    raise SystemExit(3)


def _hooks(timeout_s: float = 30.0, **named: str) -> UserHooks:
    paths = {hook: f"{__name__}:{name}" for hook, name in named.items()}
    return UserHooks(Recipe(run=RunSettings(hooks=HookSettings(timeout_s=timeout_s, **paths))))


def test_each_is_told_what_it_is_for_and_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOLD, str(tmp_path / "told"))
    close_lanes()  # so that they begin with this environment
    hooks = _hooks(before_step="before", tracker="tracker")
    done = EvalDone(
        step=3,
        accuracy=0.5,
        num_prompts=2,
        truncated_fraction=0.0,
        response_tokens_mean=4.0,
        seconds=1.0,
        path="eval/step_3.jsonl",
    )

    async def run() -> None:
        await hooks.call("before_step", step=1, groups=["a"])
        await hooks.call("after_step", step=1, report=None, groups=[])
        await hooks.call("tracker", event=done)
        await hooks.call("tracker", event=PhaseStarted(phase="train", detail=""))

    asyncio.run(run())
    first, (step, scalars) = map(json.loads, (tmp_path / "told").read_text().splitlines())
    assert first == [1, ["a"]]
    assert step == 3 and scalars["eval/accuracy"] == 0.5


@pytest.mark.parametrize(
    ("name", "said"), [("raising", "difficulty"), ("leaving", "SystemExit(3)")]
)
def test_what_one_raises_is_named_with_its_line(name: str, said: str) -> None:
    with pytest.raises(RecipeError, match=f"the before_step `{__name__}:{name}` failed") as refused:
        asyncio.run(_hooks(before_step=name).call("before_step", step=1, groups=[]))
    assert said in refused.value.why


def test_one_that_hangs_ends_at_its_bound() -> None:
    hooks = _hooks(0.1, before_step="hanging")
    with pytest.raises(RecipeError, match=f"the before_step `{__name__}:hanging` did not"):
        asyncio.run(hooks.call("before_step", step=1, groups=[]))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (f"{__name__}:tracker", "lacks the parameter groups"),
        ("nobody", "an import path like"),
        ("no_such_module:fn", "No module named"),
    ],
)
def test_one_that_cannot_be_called_is_refused_before_a_device_is_taken(
    path: str, said: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        UserHooks(Recipe(run=RunSettings(hooks=HookSettings(before_step=path))))
    assert said in refused.value.why
