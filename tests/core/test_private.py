"""Texts for others hold no token, no login, and no place of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.private import (
    REMOVED,
    without_paths,
    without_private,
    without_secrets,
    without_secrets_in,
)


def test_private_words_are_taken_out() -> None:
    said = without_private(
        f"{Path.home()}/x and hf_{'c' * 20} and sk-{'d' * 20} and ghp_{'e' * 30}"
    )
    assert said == "~/x and [removed] and [removed] and [removed]"


def test_the_root_as_home_changes_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    assert without_private("https://a.example//x in /srv") == "https://a.example//x in /srv"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("file /data/alice/train.jsonl:7 is bad", "file …/train.jsonl:7 is bad"),
        ("/home/alice/runs/r-1", "…/r-1"),
        ("path=/mnt/x/y/ and more", "path=…/y and more"),
        ("~/secret/place.txt", "…/place.txt"),
        ("https://alice:pw@host.example/a/b", "https://host.example/a/b"),
        ("tokens/s, 1/2/3 and and/or", "tokens/s, 1/2/3 and and/or"),
        ("eval/step_10.jsonl", "eval/step_10.jsonl"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("in /root", "in …/root"),
    ],
)
def test_of_paths_only_the_last_part_stays(text: str, shown: str) -> None:
    assert without_paths(text) == shown
    assert without_paths(shown) == shown


def test_secrets_of_a_recipe_are_not_shown_at_any_depth() -> None:
    value = {"env": {"SERVICE_TOKEN": "abc", "PLACE": "/srv/x/y"}, "servers": [{"api-key": "k"}]}
    assert without_secrets_in(value, name="rollout.mcp") == {
        "env": {"SERVICE_TOKEN": REMOVED, "PLACE": "…/y"},
        "servers": [{"api-key": REMOVED}],
    }
    assert without_secrets_in("problem", name="data.prompt_key") == "problem"
    assert without_secrets_in("s3cret", name="eval.endpoint.api_key") == REMOVED
    assert without_secrets_in(None, name="eval.endpoint.api_key") is None


HOOK = "https://hooks.slack.com/services/T0/B0/abcdef"


@pytest.mark.parametrize(
    ("name", "value", "is_hidden"),
    [
        ("DATABASE_URL", "postgres://me:pw@db/runs", True),
        ("ALERTS", HOOK, True),
        ("CHAT", "https://discord.com/api/webhooks/1/abc", True),
        ("SESSION_COOKIE", "anything", True),
        ("DEPLOY", "-----BEGIN OPENSSH PRIVATE KEY-----\\nabc", True),
        ("BEARER", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def", True),
        ("REMOTE", "ssh://git@host/repo", False),
        ("PATH", "/usr/bin:/bin", False),
        ("MILES_RUN_TOKEN", "ours", False),
        ("RAY_ADDRESS", "ray://me:pw@head", False),
    ],
)
def test_variables_are_hidden_by_their_names_and_by_their_values(
    name: str, value: str, is_hidden: bool
) -> None:
    assert (name not in without_secrets({name: value})) is is_hidden


def test_a_webhook_is_taken_out_of_texts() -> None:
    assert without_private(f"could not reach {HOOK} today") == (
        "could not reach https://[removed] today"
    )
