"""Keys that would go over the network for all to read are told, each place once."""

from __future__ import annotations

import pytest

from milescli.recipe.check import unencrypted_key_warnings
from milescli.recipe.schema import Recipe

WITH_KEY = {"api_key_env": "KEY", "model": "m"}
OPEN = "http://10.0.0.9:8000/v1"


def _recipe(url: str) -> Recipe:
    ask = {**WITH_KEY, "url": url}
    rollout = {
        "judge": ask,
        "remote_reward": {"url": url, "api_key_env": "KEY"},
        "user": {"endpoint": ask},
        "search": {"url": url, "api_key_env": "KEY"},
        "mcp": {"web": {"url": url, "api_key_env": "KEY"}},
        "roles": {"a": {"endpoint": ask}, "b": {"endpoint": ask}, "c": {}},
        "tools": ["calculator"],  # never called: another warning hides none
    }
    train = {"distill": {"teachers": [{"url": url}] * 2, "server": {"api_key_env": "KEY"}}}
    return Recipe.model_validate({"rollout": rollout, "train": train})


def test_every_place_that_would_send_a_key_in_the_open_is_told_once() -> None:
    told = unencrypted_key_warnings(_recipe(OPEN))
    places = [text.partition(".api_key_env")[0].lstrip("`") for text in told]
    assert places == [
        *("rollout.judge", "rollout.remote_reward", "rollout.user.endpoint", "rollout.search"),
        *("rollout.mcp.web", "rollout.roles.a.endpoint", "rollout.roles.b.endpoint"),
        "train.distill.server",
    ]
    assert all("goes to 10.0.0.9 by http, which others can read" in text for text in told)


@pytest.mark.parametrize(
    "url",
    ["https://10.0.0.9/v1", "http://127.0.0.1:1/v1", "http://127.8.9.1/v1", "http://[::1]:1/v1"],
)
def test_what_is_encrypted_or_stays_here_is_no_matter(url: str) -> None:
    assert unencrypted_key_warnings(_recipe(url)) == []


def test_a_name_that_begins_like_loopback_is_none() -> None:
    assert len(unencrypted_key_warnings(_recipe("http://127.0.0.1.example.com/v1"))) == 8
