"""The syntax of `run.alerts`: what is a target, what is refused, and that no secret is written or
shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.alerts import (
    Kind,
    expand_variables,
    fault_of,
    kind_of,
    rules,
    shown,
    with_absolute_commands,
)
from milescli.recipe.machine import RunSettings
from milescli.recipe.section import refuse


def refusal(*entries: str, on: str = "end") -> RecipeError:
    with pytest.raises(RecipeError) as refused:
        refuse(rules(RunSettings(alerts=list(entries), alerts_on=[on])))
    return refused.value


@pytest.mark.parametrize(
    ("entry", "kind", "said"),
    [
        ("https://ntfy.sh/my-runs", Kind.WEBHOOK, "https://ntfy.sh/…"),
        ("http://127.0.0.1:8000", Kind.WEBHOOK, "http://127.0.0.1:8000"),
        (
            "https://hooks.slack.com/services/$SLACK_TOKEN",
            Kind.WEBHOOK,
            "https://hooks.slack.com/…",
        ),
        ("https://x.org/hook?token=${MY_TOKEN}", Kind.WEBHOOK, "https://x.org/…"),
        ("$ALERT_WEBHOOK", Kind.VARIABLE, "$ALERT_WEBHOOK"),
        ("${ALERT_WEBHOOK}", Kind.VARIABLE, "${ALERT_WEBHOOK}"),
        (
            "mailto:me@example.org,you@example.org",
            Kind.MAIL,
            "mailto:me@example.org,you@example.org",
        ),
        ("notify-send 'a run' --urgent", Kind.COMMAND, "notify-send"),
    ],
)
def test_an_entry_is_shown_without_what_may_be_private(entry: str, kind: Kind, said: str) -> None:
    refuse(rules(RunSettings(alerts=[entry])))
    assert (kind_of(entry), shown(entry)) == (kind, said)


@pytest.mark.parametrize(
    ("entry", "secret"),
    [
        ("https://hooks.slack.com/services/T0/B0/abcdef", "abcdef"),
        ("https://discord.com/api/webhooks/1/xyz", "xyz"),
        ("https://me:word@example.org/hook", "word"),
        ("https://example.org/hook?token=opensesame", "opensesame"),
        ("https://example.org/hook?sig=opensesame", "opensesame"),
        ("https://example.org/5f0c2e1a-9a1b-4c7d-8e9f-0a1b2c3d4e5f", "5f0c2e1a"),
        ("curl -d @- https://hooks.slack.com/services/T0/B0/abcdef", "abcdef"),
        ("./tell.sh hf_abcdefghijklmnopqrst", "hf_abcdef"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(entry: str, secret: str) -> None:
    error = refusal(entry)
    assert error.what == "`run.alerts` holds a secret"
    assert secret not in str(error)
    assert "export ALERT_" in error.fixes[0]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("", "empty"),
        ("slack://x", "slack:// is not sent to"),
        ("me@example.org", "--set run.alerts=[mailto:me@example.org]"),
        ("mailto:nobody", "mailto:me@example.org"),
        ("https://example.org:99999/x", "an address is http"),
        ("https:///x", "an address is http"),
        ("sh -c 'cat", "open quotation"),
    ],
)
def test_what_is_no_target_is_refused(entry: str, said: str) -> None:
    assert said in str(refusal(entry))


def test_a_moment_is_a_word_or_a_diagnosis() -> None:
    assert "`run.alerts_on` cannot be `No Such`" in str(refusal("true", on="No Such"))


def test_an_address_takes_its_variables_from_the_environment() -> None:
    environ = {"A_TOKEN": "abc", "B_WEBHOOK": "https://x.org/secret\n"}
    assert expand_variables("https://x.org/$A_TOKEN/${A_TOKEN}", environ) == "https://x.org/abc/abc"
    assert expand_variables("$B_WEBHOOK", environ) == "https://x.org/secret"
    assert expand_variables("sh -c 'echo $A_TOKEN'", environ) == "sh -c 'echo $A_TOKEN'"
    with pytest.raises(KeyError, match="C_TOKEN"):
        expand_variables("$C_TOKEN", {"C_TOKEN": ""})
    assert fault_of("ftp://x.org") and not fault_of("https://x.org/secret")


def test_a_command_of_this_folder_is_found_from_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entries = ["./tell.sh 'two words'", "notify-send x", "https://x.org/y"]
    assert with_absolute_commands(entries) == [f"{tmp_path}/tell.sh 'two words'", *entries[1:]]
    assert (
        with_absolute_commands(entries[1:]) is not None
        and with_absolute_commands(entries[1:]) == entries[1:]
    )
