"""Tests of masking: no secret gets out, whatever form it has."""

from __future__ import annotations

import pytest

from milescli.doctor.finding import fail, ok
from milescli.doctor.masking import mask, mask_environment, mask_secrets

SECRETS = {
    "WANDB_API_KEY": "sk-12345678",
    "HF_TOKEN": "hf_abcdef",
    "db_password": "hunter22",
    "HOME": "/home/me",
}


def test_no_secret_is_shown() -> None:
    findings = mask_secrets(
        fail("x", "sk-12345678", why="hf_abcdef in /home/me", fix="login hunter22")[0], SECRETS
    )
    assert (findings.what, findings.why, findings.fix) == ("***", "*** in /home/me", ["login ***"])


def test_short_values_are_not_masked_for_they_are_no_secrets() -> None:
    assert mask_secrets(ok("x", "1 of 2")[0], {"USE_TOKENS": "1"}).what == "1 of 2"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://me:hunter2@mirror/path", "https://***@mirror/path"),
        ("http://me:p@ss@proxy:3128 and http://a:b@c", "http://***@proxy:3128 and http://***@c"),
        ("https://mirror/x?user=me&api_key=abc&n=1", "https://mirror/x?user=me&api_key=***&n=1"),
        ("https://mirror/x?X-Amz-Signature=abc", "https://mirror/x?X-Amz-Signature=***"),
        ("https://mirror/models/name", "https://mirror/models/name"),
    ],
)
def test_credentials_of_addresses_are_masked(text: str, masked: str) -> None:
    assert mask(text, {}) == masked


def test_a_password_of_an_address_is_masked_where_a_library_tells_a_piece_of_it() -> None:
    environ = {
        "HF_ENDPOINT": "https://u:pw@ss@nowhere",
        "https_proxy": "http://me:hunter2@proxy:3128",
    }
    assert (
        mask("nonnumeric port: 'pw@ss@nowhere'; hunter2", environ)
        == "nonnumeric port: '***@nowhere'; ***"
    )


def test_of_a_variable_that_sounds_secret_even_a_short_value_is_kept_back() -> None:
    environ = {
        "RAY_REDIS_PASSWORD": "abc",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "HF_TOKEN": "hf_abcdef",
        "MILES_X": "hf_abcdef",
    }
    assert mask_environment(environ, prefixes=("RAY_", "MILES_")) == {
        "MILES_X": "***",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "RAY_REDIS_PASSWORD": "***",
    }
