"""Tests of the call of a user's reward before a run: each kind of mistake, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RewardError
from milescli.core.types import Prompt
from milescli.recipe.schema import Rollout
from milescli.runtime.inputs.reward_trial import try_rewards

PROMPT = Prompt(index=0, token_ids=[1], text="2 + 2?", label="4")
REWARDS = """
import os, math, time, urllib.request

def good(*, prompt, response, label): return 1.0
async def good_async(*, prompt, response, label): return 0.5
def group(*, prompt, responses, label): return [1.0] * len(responses)
def batch(*, prompts, responses, labels): return [0.0] * len(responses)
def nothing(*, prompt, response, label): pass
async def nothing_async(*, prompt, response, label): pass
def nan(*, prompt, response, label): return math.nan
def text(*, prompt, response, label): return "1.0"
def listed(**fields): return [1.0]
def raising(*, prompt, response, label): return response["text"]
def ends(*, prompt, response, label): os._exit(3)
def hangs(*, prompt, response, label): time.sleep(3600)
def one_number(*, prompt, responses, label): return 1.0
def too_few(*, prompts, responses, labels): return []
def whole(*, prompt, response, label):
    import json
    return float(json.loads(response)[0]["role"] == "asker")
def service(*, prompt, response, label):
    return float(urllib.request.urlopen("http://127.0.0.1:9/", timeout=60).read())
def no_file(*, prompt, response, label): return float(open("/nowhere/at/all").read())
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tried_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))


def _tried(reward: object, **settings: object) -> list[str]:
    rollout = Rollout.model_validate({"reward": reward, **settings})
    return list(try_rewards(rollout, PROMPT))


@pytest.mark.parametrize("name", ["good", "good_async", "group", "batch"])
def test_a_reward_of_any_form_passes(name: str) -> None:
    assert _tried(f"tried_rewards:{name}") == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "must be a number, but is None"),
        ("nothing_async", "must be a number, but is None"),
        ("nan", "must be finite, but is nan"),
        ("text", "must be a number, but is '1.0'"),
        ("listed", r"must be a number, but is \[1.0\]"),
        ("raising", "TypeError: string indices must be integers"),
        ("ends", "its process ended with exit code 3"),
        ("one_number", "return one number per response"),
        ("too_few", "0 rewards for 1 responses"),
        ("no_file", "FileNotFoundError"),
    ],
)
def test_a_mistake_is_refused_and_no_retry_is_suggested(name: str, why: str) -> None:
    with pytest.raises(RewardError, match=why) as refusal:
        _tried(f"tried_rewards:{name}")
    assert f"`tried_rewards:{name}` failed before the run" in refusal.value.what
    assert not any("retries" in fix for fix in refusal.value.fixes)
    assert "miles plugins check" in refusal.value.fixes[-1]


def test_a_reward_that_hangs_is_ended_at_its_bound() -> None:
    with pytest.raises(RewardError, match="did not return within 1 s") as refusal:
        _tried("tried_rewards:hangs", reward_timeout_s=1.0)
    assert refusal.value.fixes[0].startswith("--set rollout.reward_timeout_s=")


def test_a_service_that_is_not_up_yet_is_no_mistake() -> None:
    (said,) = _tried("tried_rewards:service")
    assert "could not be tried" in said and "Connection refused" in said


def test_rewards_of_several_parts_are_tried_and_those_that_ship_are_not() -> None:
    both = {"judge": 1.0, "tried_rewards:good": 0.5}
    judge = {"url": "http://127.0.0.1:9/v1", "model": "m"}
    assert _tried(both, judge=judge) == []


def test_what_another_agent_returns_is_not_known() -> None:
    (said,) = _tried("tried_rewards:raising", agent="mine.agents:solve")
    assert "does `mine.agents:solve` give it other responses?" in said


def test_a_role_that_scores_the_episode_is_given_an_episode() -> None:
    roles = {"asker": {"reward": "tried_rewards:whole", "scores": "episode"}, "other": {}}
    assert _tried("gsm8k", agent="multi_agent", roles=roles) == []
