"""Agents of a recipe: their roles and their user are read and written, and refused where they
cannot be meant."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.agents import Role, SpeakerSettings
from milescli.recipe.resolved import load_resolved, resolved_yaml
from tests.recipe.conftest import SMALL, Place

ROLES = """\
rollout:
  agent: multi_agent
  rounds: 2
  roles:
    solver: {prompt: no}
    critic:
      sees: all
      endpoint: {url: http://127.0.0.1:1/v1, model: 007, timeout_s: 5}
"""
PAIR = "rollout.roles={a: {}, b: {}}"
CHAT = "rollout.agent=chat"
AT = "rollout.user.endpoint.url=http://h/v1"
OF = "rollout.user.endpoint.model=m"


def test_roles_are_read_in_order_and_written_again_without_loss(
    place: Place, tmp_path: Path
) -> None:
    loaded = place.load(SMALL + ROLES)
    roles = loaded.recipe.rollout.roles
    assert list(roles) == ["solver", "critic"]
    assert roles["solver"] == Role(prompt="no"), "texts keep their spelling"
    assert roles["critic"].endpoint == SpeakerSettings(
        url="http://127.0.0.1:1/v1", model="007", timeout_s=5.0
    )
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(loaded))
    assert load_resolved(tmp_path / "resolved.yaml").recipe == loaded.recipe


def test_roles_on_the_command_line_take_the_place_of_the_recipes(place: Place) -> None:
    loaded = place.load(SMALL + ROLES, sets=[PAIR, "rollout.final_role=a"])
    assert loaded.recipe.rollout.roles == {"a": Role(), "b": Role()}
    assert loaded.recipe.rollout.role_turns == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        ([], "has no roles"),
        ([PAIR, "rollout.final_role=c"], "no role is called `c`"),
        (["rollout.roles={a b: {}}"], "cannot be called `a b`"),
        ([PAIR, "rollout.rounds=5"], "10 turns is longer than it may be"),
        ([PAIR, "rollout.final_role=a"], "the role `b` never speaks"),
        (["rollout.roles={a: {sees: others}, b: {}}"], "`a` would speak first and see nothing"),
        (["rollout.roles={a: {}}", "rollout.rounds=2"], "`a` would be asked again with nothing"),
        (
            ["rollout.roles={a: {}, b: {sees: prompt}}", "rollout.rounds=2"],
            "`b` would be asked again with nothing new",
        ),
        (["rollout.roles={a: {endpoint: {url: http://h/v1, model: m}}}"], "played by the policy"),
        (["rollout.roles={a: {endpoint: {model: m}}}"], "`a` has an endpoint without `url`"),
        (["rollout.roles={a: {endpoint: {url: http://h/v1}}}"], "endpoint without `model`"),
        (["rollout.roles={a: {endpoint: {url: http://u:p@h/v1, model: m}}}"], "holds a user"),
        ([PAIR, "data.chat_template=none"], "needs a chat template"),
        (
            [
                *("rollout.roles={a: {}, b: {}}", "rollout.final_role=a", "rollout.rounds=2"),
                *("rollout.reward=reward_model", "rollout.reward_model.path=x"),
            ],
            "`reward_model` cannot score the role `a`",
        ),
        (["rollout.roles={a: {trained: false}}"], "no role is trained"),
        (
            ["rollout.roles={a: {trained: false}, b: {endpoint: {url: http://h/v1, model: m}}}"],
            "no role is trained",
        ),
        (
            ["rollout.roles={a: {trained: false, reward: math}, b: {}}"],
            "`a` has a reward that teaches nobody",
        ),
        (["rollout.roles={a: {policy: runs/old}}"], "no role is played by the policy"),
        (["rollout.roles={a: {policy: ' '}, b: {}}"], "`a` has a `policy` without a name"),
        (
            ["rollout.roles={a: {policy: x, endpoint: {url: http://h/v1, model: m}}, b: {}}"],
            "`a` would be played by two models",
        ),
        (["rollout.roles={a: {policy: x, reward: math}, b: {}}"], "teaches nobody"),
        (
            ["rollout.roles={a: {policy: x}, b: {policy: y}, c: {}}", "engines.num=2"],
            "no engine would be left",
        ),
        (["rollout.roles={a: {scores: episode}}"], "`a` has no reward of its own"),
        (["rollout.roles={a: {reward: {}}}"], "the reward of the role `a` weighs nothing"),
        (["rollout.roles={a: {reward: {math: 0.0}}}"], "role `a` weighs nothing"),
        (["rollout.roles={a: {reward: judge}}"], "the reward `judge` has no address"),
        (
            ["rollout.roles={a: {reward: math}}", "train.advantage=remax"],
            "`remax` knows no rewards of roles",
        ),
        (["rollout.roles={a: {see: all}}"], "cannot be `{a: {see: all}}`"),
        (["rollout.roles={a: 3}"], "cannot be `{a: 3}`"),
        (["rollout.roles=[a]"], r"cannot be `\[a\]`"),
    ],
)
def test_roles_that_cannot_play_are_refused(place: Place, sets: list[str], what: str) -> None:
    with pytest.raises(RecipeError, match=what) as caught:
        place.load(sets=["rollout.agent=multi_agent", *sets])
    assert caught.value.why and caught.value.fixes


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        ("{a: {see: all}}", "of which `a` is wrong in the unknown key `see`"),
        ("{a: {sees: none}}", "`a` is wrong in `sees` (one of all, prompt, others)"),
        ("{a: {endpoint: {retries: -1}}}", "`a` is wrong in `endpoint.retries` (a whole number"),
        ("{a: {endpoint: {uri: x}}}", "wrong in the unknown key `endpoint.uri`"),
        ("{a: 3}", "of which `a` is no mapping"),
    ],
)
def test_a_refusal_says_which_role_and_which_key(place: Place, roles: str, why: str) -> None:
    with pytest.raises(RecipeError) as caught:
        place.load(sets=["rollout.agent=multi_agent", f"rollout.roles={roles}"])
    assert why in caught.value.why
    assert caught.value.fixes == ["--set 'rollout.roles={NAME: {prompt: TEXT}}'"]


def test_a_role_that_is_named_twice_is_refused(place: Place) -> None:
    with pytest.raises(RecipeError, match="twice"):
        place.load(f"{SMALL}rollout:\n  roles:\n    a: {{}}\n    a: {{}}\n")


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        ([], "has no user"),
        (["rollout.user.script=[Sure]", AT, OF], "has two users"),
        (["rollout.user.script=[a, b]", "rollout.max_turns=2"], "get round to the whole script"),
        (["rollout.user.script=['']"], "has an empty text"),
        ([AT, OF], "does not know how to end"),
        ([AT, OF, "rollout.user.prompt=Say STOP"], "does not know how to end"),
        ([AT, "rollout.user.prompt=[END]"], "the user has an endpoint without `model`"),
        (["rollout.user.endpoint.url=here", OF, "rollout.user.prompt=[END]"], "cannot be `here`"),
    ],
)
def test_a_user_who_cannot_talk_is_refused(place: Place, sets: list[str], what: str) -> None:
    with pytest.raises(RecipeError, match=what) as caught:
        place.load(sets=[CHAT, *sets])
    assert caught.value.why and caught.value.fixes


@pytest.mark.parametrize(
    ("sets", "doubt"),
    [
        ([PAIR], "`rollout.roles` never speak"),
        ([CHAT, "rollout.user.script=[a]", "rollout.tools=[calculator]"], "are never called"),
        (
            [CHAT, AT, OF, "rollout.user.prompt=[END]", "rollout.user.endpoint.api_key_env=K"],
            "goes to h by http",
        ),
    ],
)
def test_what_is_probably_not_meant_is_said(place: Place, sets: list[str], doubt: str) -> None:
    (warning,) = place.load(sets=sets).warnings
    assert doubt in warning


@pytest.mark.parametrize("agent", ["multi_agent", "chat"])
def test_the_advice_can_be_pasted(place: Place, agent: str) -> None:
    with pytest.raises(RecipeError) as caught:
        place.load(sets=[f"rollout.agent={agent}"])
    advice = shlex.split(caught.value.fixes[0])
    place.load(sets=[f"rollout.agent={agent}", advice[1]])
