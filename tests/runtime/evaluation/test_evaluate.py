"""An episode that is watched: shown turn by turn, ended by its environment or its bounds."""

from __future__ import annotations

import asyncio

import pytest

from milescli.core.types import Prompt
from milescli.recipe.agents import EnvironmentSettings
from milescli.rollout.base import Outcome
from milescli.runtime.evaluation.evaluate import WatchedEpisode
from tests.agents.scripted import Engine, session_of

PROMPT = Prompt(index=4, token_ids=[], text="", label="4")


def _watch(texts: list[str], *, max_turns: int = 8) -> tuple[Outcome, list[str]]:
    shown = list[str]()
    watched = WatchedEpisode(
        settings=EnvironmentSettings(name="tests.agents.user_environments:Count"),
        prompt=PROMPT,
        max_turns=max_turns,
        begun=shown.append,
        acted=lambda said, step: shown.append(f"{said} -> {step.observation} {step.reward:g}"),
    )
    return asyncio.run(watched(PROMPT, session_of(Engine(texts)))), shown


def test_every_turn_is_shown_as_it_is_done() -> None:
    outcome, shown = _watch(["a", "bb", "ccc"])
    assert shown[0] == "begin 4" and [line.split(" ")[0] for line in shown[1:]] == [
        "a",
        "bb",
        "ccc",
    ]
    assert outcome.reward == 6 and not outcome.is_cut and outcome.text == "a\nbb\nccc"


@pytest.mark.parametrize("max_turns", [1, 2])
def test_it_is_left_at_its_bound(max_turns: int) -> None:
    outcome, shown = _watch(["a", "bb", "ccc"], max_turns=max_turns)
    assert len(shown) == 1 + max_turns and outcome.is_cut
