"""Roles that speak in turn: what each is shown, what is trained on, and what ends an episode."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from milescli.agents.multi_agent import MultiAgent
from milescli.core.errors import AgentError, ContextFull, EndpointError, RecipeError
from milescli.core.types import Prompt, StopReason
from milescli.recipe.agents import Role
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome
from milescli.rollout.episode.episode import load_agent
from milescli.rollout.episode.session import RecordingSession
from tests.agents.scripted import Engine, sampled, session_of
from tests.endpoint_server import Asked, Reply, quick_retries, said, serving

__all__ = ["quick_retries"]
PROMPT = Prompt(index=0, token_ids=[1], text="6 * 7?", label="42")
PAIR = {"solver": Role(prompt="Solve."), "verifier": Role(prompt="Check.")}


def play(
    engine: Engine, roles: dict[str, Role], *, prompt: Prompt = PROMPT, **settings: Any
) -> tuple[Outcome, RecordingSession]:
    """One episode."""
    session = session_of(engine, max_tokens=settings.pop("max_tokens", 100_000))
    agent = MultiAgent(Rollout(agent="multi_agent", roles=roles, **settings))
    return asyncio.run(agent(prompt, session)), session


def chatml(*turns: tuple[str, str]) -> str:
    """As the template writes what a role is asked."""
    written = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{written}<|im_start|>assistant\n"


def test_each_role_has_its_own_conversation_in_which_the_others_are_users() -> None:
    engine = Engine(["41", "no", "42", "yes"])
    outcome, _ = play(engine, PAIR, rounds=2)
    solver = [("system", "Solve."), ("user", "6 * 7?")]
    checked = "6 * 7?\n\nsolver: 41"
    assert engine.given == [
        chatml(*solver),
        chatml(("system", "Check."), ("user", checked)),
        chatml(*solver, ("assistant", "41"), ("user", "verifier: no")),
        chatml(
            ("system", "Check."),
            ("user", checked),
            ("assistant", "no"),
            ("user", "solver: 42"),
        ),
    ]
    assert outcome.text == "yes" and not outcome.is_cut
    assert outcome.figures == {"solver_turns": 2, "verifier_turns": 2}


@pytest.mark.parametrize("family", ["chatml", "marked", "llama 3", "qwen 3"])
def test_every_turn_is_on_the_loss_mask_of_its_roles_trajectory_alone(family: str) -> None:
    engine = Engine(["41", "no", "42", "yes"], family=family)
    _, session = play(engine, PAIR, rounds=2)
    ended = engine.text_of([engine.tokenizer.eos_id])
    learned = [sampled(engine, line.token_ids, line.loss_mask) for line in session.trajectories()]
    assert [text.removesuffix(ended) for line in learned for text in line] == [
        *("41", "42"),
        *("no", "yes"),
    ]
    assert len(learned) == 2


def test_roles_that_are_asked_the_same_have_trajectories_of_their_own() -> None:
    engine = Engine(["41", "42"])
    same = {"one": Role(sees="prompt"), "other": Role(sees="prompt")}
    outcome, session = play(engine, same)
    assert engine.given[0] == engine.given[1]
    assert [line.num_loss_tokens for line in session.trajectories()] == [3, 3]
    assert outcome.text == "42"


def test_a_role_sees_the_prompt_alone_or_the_others_alone() -> None:
    engine = Engine(["6 and 7", "42"])
    play(engine, {"teller": Role(sees="prompt"), "solver": Role(sees="others")})
    assert engine.given == [chatml(("user", "6 * 7?")), chatml(("user", "teller: 6 and 7"))]


def test_a_roles_prompt_stands_before_that_of_the_row() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]
    prompt = Prompt(index=0, token_ids=[1], text="6 * 7?", label="42", turns=turns)
    engine = Engine(["42"])
    play(engine, {"solver": Role(prompt="Solve.")}, prompt=prompt)
    assert engine.given == [chatml(("system", "Solve.\n\nBe brief."), ("user", "6 * 7?"))]


def test_the_episode_ends_with_the_last_turn_of_the_final_role() -> None:
    engine = Engine(["41", "no", "42"])
    outcome, session = play(engine, PAIR, rounds=2, final_role="solver")
    assert outcome.text == "42" and len(session.turns) == 3
    assert outcome.figures == {"solver_turns": 2, "verifier_turns": 1}


def test_a_turn_that_is_cut_off_ends_the_episode() -> None:
    outcome, session = play(Engine(["41", "hm..."]), PAIR, rounds=2, final_role="solver")
    assert outcome.is_cut and outcome.text == "41"
    assert session.turns[-1].stop_reason is StopReason.LENGTH


def test_roles_with_rewards_of_their_own_say_what_is_scored() -> None:
    roles = {
        "solver": Role(reward="math"),
        "verifier": Role(reward="judge", scores="episode"),
        "host": Role(),
    }
    outcome, _ = play(Engine(["41", "no", "so?", "42", "yes", "so."]), roles, rounds=2)
    assert outcome.text == "so."
    assert outcome.turn_roles == ["solver", "verifier", "host"] * 2
    assert list(outcome.role_texts) == ["solver", "verifier"]
    assert outcome.role_texts["solver"] == "42"
    told = json.loads(outcome.role_texts["verifier"])
    assert [turn["role"] for turn in told] == outcome.turn_roles
    assert [turn["content"] for turn in told] == ["41", "no", "so?", "42", "yes", "so."]


def test_a_role_that_did_not_get_round_to_speak_has_nothing_to_be_scored() -> None:
    roles = {"solver": Role(reward="math"), "verifier": Role(reward="math")}
    outcome, _ = play(Engine(["hm..."]), roles)
    assert outcome.is_cut and outcome.role_texts == {"solver": "hm..."}


def test_nothing_of_a_role_that_is_not_trained_is_on_a_loss_mask() -> None:
    engine = Engine(["41", "no", "42", "yes"])
    _, session = play(engine, PAIR, rounds=2)
    roles = ["solver", "verifier"] * 2
    solver, verifier = session.trajectories((), roles, untrained={"verifier"})
    assert (solver.role, verifier.role) == ("solver", "verifier")
    assert solver.num_loss_tokens and not verifier.num_loss_tokens
    assert not any(verifier.logprobs) and "no" in engine.text_of(verifier.token_ids)


def test_a_role_without_room_ends_the_episode() -> None:
    engine = Engine(["4" * 30, "no", "42"])
    outcome, session = play(engine, PAIR, rounds=2, final_role="solver", max_tokens=90)
    assert outcome.is_cut and outcome.text == "4" * 30
    assert len(session.turns) < 3
    with pytest.raises(ContextFull):
        play(Engine(["41"]), PAIR, max_tokens=10)


def test_a_role_of_an_older_policy_is_heard_and_never_trained_on() -> None:
    engine, older = Engine(["41", "42"]), Engine(["Look again.", "Good..."])
    session = session_of(engine, others={"critic": older})
    roles = {"solver": Role(), "critic": Role(prompt="Find the mistake.", policy="runs/old@20")}
    agent = MultiAgent(Rollout(agent="multi_agent", roles=roles, rounds=2))
    outcome = asyncio.run(agent(PROMPT, session))
    assert older.given[0] == chatml(
        ("system", "Find the mistake."), ("user", "6 * 7?\n\nsolver: 41")
    )
    assert "critic: Look again." in engine.given[1] and not outcome.is_cut
    assert outcome.turn_roles == ["solver"] * 2 and outcome.text == "Good..."
    (line,) = session.trajectories((), outcome.turn_roles)
    assert sampled(engine, line.token_ids, line.loss_mask) == ["41<|im_end|>", "42<|im_end|>"]


def test_what_an_older_policy_says_is_fixed_by_the_samples_seed() -> None:
    async def seeds(role: str) -> list[int | None]:
        engine, older = Engine(["41"]), Engine(["no", "yes"])
        session = session_of(engine, others={role: older})
        for _ in range(2):
            await session.played_by(role).chat(PROMPT.messages)
        await session.chat(PROMPT.messages)
        return [*older.seeds, *engine.seeds]

    ones, others = asyncio.run(seeds("one")), asyncio.run(seeds("other"))
    assert ones == asyncio.run(seeds("one")) and len({*ones, *others}) == 5
    with pytest.raises(AgentError, match="no model of its own"):
        session_of(Engine([])).played_by("critic")


def test_an_older_policys_engine_that_fails_is_no_fault_of_the_agent() -> None:
    session = session_of(Engine(["41"]), others={"critic": Engine([])})
    with pytest.raises(IndexError):
        asyncio.run(session.played_by("critic").chat(PROMPT.messages))
    assert isinstance(session.engine_failure, IndexError)


def test_a_role_behind_an_endpoint_is_heard_and_never_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CRITIC_KEY", "sk-1")
    engine = Engine(["41", "42"])
    with serving(lambda asked, number: said("Look again.")) as server:
        endpoint = {"url": server.url, "model": "big", "api_key_env": "CRITIC_KEY"}
        critic = Role.model_validate({"prompt": "Find the mistake.", "endpoint": endpoint})
        roles = {"solver": Role(), "critic": critic}
        outcome, session = play(engine, roles, rounds=2, final_role="solver")
    (asked,) = server.asked
    assert asked.authorization == "Bearer sk-1" and asked.body["model"] == "big"
    assert asked.body["messages"] == [
        {"role": "system", "content": "Find the mistake."},
        {"role": "user", "content": "6 * 7?\n\nsolver: 41"},
    ]
    assert outcome.text == "42" and outcome.figures["critic_turns"] == 1
    (line,) = session.trajectories()
    learned = sampled(engine, line.token_ids, line.loss_mask)
    assert learned == ["41<|im_end|>", "42<|im_end|>"]
    assert "critic: Look again." in engine.text_of(line.token_ids)


def _broken(asked: Asked, number: int) -> Reply:
    return Reply("out of order", status=503)


def test_an_endpoint_that_fails_is_named_with_its_role(quick_retries: None) -> None:
    with serving(_broken) as server:
        endpoint = {"url": server.url, "model": "big", "retries": 1}
        roles = {"critic": Role.model_validate({"endpoint": endpoint}), "solver": Role()}
        with pytest.raises(EndpointError, match="the role `critic` failed") as caught:
            play(Engine(["42"]), roles)
    assert "out of order" in caught.value.why and len(server.asked) == 2


def test_a_key_that_is_not_there_is_refused_where_the_agent_is_made() -> None:
    endpoint = {"url": "http://127.0.0.1:1/v1", "model": "big", "api_key_env": "NO_SUCH_KEY"}
    roles = {"critic": Role.model_validate({"endpoint": endpoint}), "solver": Role()}
    with pytest.raises(RecipeError, match="the role `critic` needs an API key") as caught:
        load_agent(Rollout(agent="multi_agent", roles=roles))
    assert caught.value.fixes == ["export NO_SUCH_KEY=..."]
