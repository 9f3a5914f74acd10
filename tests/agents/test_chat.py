"""A conversation with a user: scripted or simulated, its turns on the loss mask, its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from milescli.agents.chat import Chat
from milescli.core.errors import ContextFull
from milescli.core.types import Prompt
from milescli.recipe.agents import UserSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome
from milescli.rollout.episode.session import RecordingSession
from tests.agents.scripted import Engine, sampled, session_of
from tests.endpoint_server import said, serving

PROMPT = Prompt(
    index=0,
    token_ids=[1],
    text="Hello?",
    turns=[{"role": "system", "content": "Sell."}, {"role": "user", "content": "Hello?"}],
)
SURE = ["Are you sure?", "Really?"]
CUSTOMER = "You want a lamp. When you have it, say [END]."


def play(
    engine: Engine, user: dict[str, Any], *, max_tokens: int = 100_000, **settings: Any
) -> tuple[Outcome, RecordingSession]:
    """One episode."""
    session = session_of(engine, max_tokens=max_tokens)
    user_settings = UserSettings.model_validate(user)
    agent = Chat(Rollout(agent="chat", user=user_settings, **settings))
    return asyncio.run(agent(PROMPT, session)), session


@pytest.mark.parametrize("family", ["chatml", "llama 3", "qwen 3"])
def test_a_scripted_user_answers_each_response_and_the_last_one_is_scored(family: str) -> None:
    engine = Engine(["one", "two", "three"], family=family)
    outcome, session = play(engine, {"script": SURE})
    assert outcome.text == "three" and not outcome.is_cut
    assert "Are you sure?" in engine.given[1] and "Really?" in engine.given[2]
    (line,) = session.trajectories()
    ended = engine.text_of([engine.tokenizer.eos_id])
    learned = sampled(engine, line.token_ids, line.loss_mask)
    assert learned == [text + ended for text in ("one", "two", "three")]


def test_a_simulated_user_sees_the_other_side_and_ends_by_its_word() -> None:
    says = ["How much is it?", "Thanks. [END]"]
    engine = Engine(["A lamp.", "Nine."])
    with serving(lambda asked, number: said(says[number])) as server:
        user = {"prompt": CUSTOMER, "endpoint": {"url": server.url, "model": "m"}}
        outcome, session = play(engine, user)
    assert outcome.text == "Nine." and not outcome.is_cut
    assert server.asked[1].body["messages"] == [
        {"role": "system", "content": CUSTOMER},
        {"role": "assistant", "content": "Hello?"},
        {"role": "user", "content": "A lamp."},
        {"role": "assistant", "content": "How much is it?"},
        {"role": "user", "content": "Nine."},
    ]
    (line,) = session.trajectories()
    assert "[END]" not in engine.text_of(line.token_ids)


def test_a_user_who_does_not_end_is_left_at_the_bound() -> None:
    with serving(lambda asked, number: said("Go on.")) as server:
        user = {"prompt": CUSTOMER, "endpoint": {"url": server.url, "model": "m"}}
        outcome, session = play(Engine(["a", "b", "c"]), user, max_turns=3)
    assert outcome.is_cut and outcome.text == "c" and len(session.turns) == 3
    assert len(server.asked) == 2, "what comes after the last turn is not asked for"


@pytest.mark.parametrize(("texts", "max_tokens"), [(["one", "two..."], 999), (["one" * 20], 125)])
def test_a_conversation_without_room_ends(texts: list[str], max_tokens: int) -> None:
    outcome, _ = play(Engine(texts), {"script": SURE}, max_tokens=max_tokens)
    assert outcome.is_cut and outcome.text == texts[-1]


def test_a_prompt_that_does_not_fit_says_so() -> None:
    with pytest.raises(ContextFull):
        play(Engine(["one"]), {"script": SURE}, max_tokens=10)
