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
        ([], "needs roles"),
        ([PAIR, "rollout.final_role=c"], "there is no role `c`"),
        (["rollout.roles={a b: {}}"], "`a b` is not a valid name"),
        ([PAIR, "rollout.rounds=5"], "10 turns exceeds the limit"),
        ([PAIR, "rollout.final_role=a"], "the role `b` never gets a turn"),
        (
            ["rollout.roles={a: {sees: others}, b: {}}"],
            "`a` would speak first without seeing anything",
        ),
        (["rollout.roles={a: {}}", "rollout.rounds=2"], "`a` would speak again without seeing"),
        (
            ["rollout.roles={a: {}, b: {sees: prompt}}", "rollout.rounds=2"],
            "`b` would speak again without seeing anything new",
        ),
        (["rollout.roles={a: {endpoint: {url: http://h/v1, model: m}}}"], "does not play any role"),
        (["rollout.roles={a: {endpoint: {model: m}}}"], "`a` has an endpoint without `url`"),
        (["rollout.roles={a: {endpoint: {url: http://h/v1}}}"], "endpoint without `model`"),
        (
            ["rollout.roles={a: {endpoint: {url: http://u:p@h/v1, model: m}}}"],
            "contains a user name",
        ),
        ([PAIR, "data.chat_template=none"], "needs a chat template"),
        (
            [
                *("rollout.roles={a: {}, b: {}}", "rollout.final_role=a", "rollout.rounds=2"),
                *("rollout.reward=reward_model", "rollout.reward_model.path=x"),
            ],
            "`reward_model` cannot score the role `a`",
        ),
        (["rollout.roles={a: {trained: false}}"], "does not train any role"),
        (
            ["rollout.roles={a: {trained: false}, b: {endpoint: {url: http://h/v1, model: m}}}"],
            "does not train any role",
        ),
        (
            ["rollout.roles={a: {trained: false, reward: math}, b: {}}"],
            "`a` has no effect",
        ),
        (["rollout.roles={a: {policy: runs/old}}"], "the policy does not play any role"),
        (["rollout.roles={a: {policy: ' '}, b: {}}"], "`policy` of the role `a` is empty"),
        (
            ["rollout.roles={a: {policy: x, endpoint: {url: http://h/v1, model: m}}, b: {}}"],
            "`a` has two models",
        ),
        (["rollout.roles={a: {policy: x, reward: math}, b: {}}"], "has no effect"),
        (
            ["rollout.roles={a: {policy: x}, b: {policy: y}, c: {}}", "engines.num=2"],
            "no engine would be left",
        ),
        (["rollout.roles={a: {scores: episode}}"], "`a` has no reward of its own"),
        (["rollout.roles={a: {reward: {}}}"], "all weights of the reward of the role `a` are 0"),
        (["rollout.roles={a: {reward: {math: 0.0}}}"], "role `a` are 0"),
        (["rollout.roles={a: {reward: judge}}"], "the reward `judge` needs an address"),
        (
            ["rollout.roles={a: {reward: math}}", "train.advantage=remax"],
            "`remax` does not support rewards of roles",
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
        ("{a: 3}", "of which `a` is not a mapping"),
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
        (
            ["rollout.user.script=[a, b]", "rollout.max_turns=2"],
            "the episode would end before the script does",
        ),
        (["rollout.user.script=['']"], "contains an empty text"),
        ([AT, OF], "cannot end the conversation"),
        ([AT, OF, "rollout.user.prompt=Say STOP"], "cannot end the conversation"),
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
