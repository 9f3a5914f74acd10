"""Tests of finding rewards by name, and of the contract that all of them bear."""

from __future__ import annotations

import importlib.util
import json
from importlib.util import find_spec

import pytest

from milescli.core.errors import RecipeError
from milescli.core.plug_points import REWARDS
from milescli.recipe.rewards import MatchSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.contract import check_reward
from milescli.rollout.rewards import load_rewards, needs_label
from milescli.rollout.rewards.text.instruction_checks import CHECKS

KWARGS = {
    **{key: ["x"] for key in ("keywords", "forbidden_words")},
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), "at least"),
    **dict.fromkeys(("keyword", "letter", "first_word", "prompt_to_repeat", "end_phrase"), "x"),
    **dict.fromkeys(("frequency", "let_frequency", "num_sentences", "num_paragraphs"), 2),
    **dict.fromkeys(("num_words", "nth_paragraph", "num_placeholders", "num_bullets"), 1),
    **dict.fromkeys(("num_highlights", "num_sections", "capital_frequency"), 1),
    "language": "en",
    "postscript_marker": "P.S.",
    "section_spliter": "S",
}
"""Of all instructions."""
COMPARING = {"math", "gsm8k", "exact_match", "f1"}


@pytest.mark.parametrize("name", sorted(COMPARING))
def test_every_reward_that_compares_bears_the_contract(name: str) -> None:
    rewards = check_reward(load_rewards(Rollout(reward=name))[name])
    assert all(0.0 <= reward <= 1.0 for reward in rewards)
    assert rewards[1:3] == [0.0, 0.0]


@pytest.mark.parametrize("name", ["format", "length"])
def test_every_reward_that_looks_at_the_form_bears_the_contract(name: str) -> None:
    rewards = check_reward(load_rewards(Rollout(reward=name))[name])
    assert set(rewards) <= {0.0, 1.0}


def test_which_rewards_need_a_label() -> None:
    # whose library is an extra
    known = set(REWARDS.builtin) - (
        {"reasoning_gym"} if find_spec("reasoning_gym") is None else set()
    )
    needing = {name for name in known if needs_label(Rollout(reward=name))}
    others = {"multiple_choice", "instructions", "reasoning_gym", "code"}
    assert needing == known & (COMPARING | others)


LABELS = {
    "multiple_choice": "B",
    "instructions": json.dumps(
        {"instruction_id_list": list(CHECKS), "kwargs": [KWARGS] * len(CHECKS)}
    ),
}


PIECES = (" ", "\n", "*", "[", "<answer>", "answer is ", "####", ". ", "(A", "`" * 3)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["exact_match", "f1", "format", "gsm8k", *LABELS])
def test_no_response_keeps_a_reward_busy(name: str) -> None:
    """Those that run in threads of the driver are done in one pass over the text."""
    if name == "instructions" and importlib.util.find_spec("langdetect") is None:
        pytest.skip("needs pip install 'miles-cli[instructions]'")
    reward = load_rewards(Rollout(reward=name, match=MatchSettings(normalize="squad")))[name]
    for piece in PIECES:
        response = f"The answer is:{piece * 50_000}x"
        assert reward(prompt="", response=response, label=LABELS.get(name, "4")) <= 1.0


def test_an_unknown_reward_is_answered_with_the_nearest() -> None:
    with pytest.raises(RecipeError) as error:
        load_rewards(Rollout(reward="gms8k"))
    assert error.value.fixes == ["--set rollout.reward=gsm8k"]


def test_a_reward_of_another_signature_is_refused() -> None:
    with pytest.raises(RecipeError, match="lacks the parameters prompt, response, label"):
        load_rewards(Rollout(reward="json:JSONDecodeError"))


def test_a_reward_by_import_path_needs_a_label_only_where_it_says_so() -> None:
    assert needs_label(Rollout(reward="tests.rollout.rewards.bad_rewards:good")) is None
    assert needs_label(Rollout(reward="format")) is False
    assert needs_label(Rollout(reward="milescli.rollout.rewards.math.gsm8k:gsm8k"))
    assert needs_label(Rollout(reward={"tests.rollout.rewards.bad_rewards:good": 1.0, "math": 0.0}))
