"""Which variables a process that calls nobody outside does not inherit."""

from __future__ import annotations

import os

import pytest

from milescli.core.private import hidden_secrets, is_secret, without_secrets


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "OPENAI_API_KEY"]
)
def test_secrets_are_known_by_name(name: str) -> None:
    assert is_secret(name)
    assert without_secrets({name: "x", "PATH": "y"}) == {"PATH": "y"}


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "NCCL_IB_PKEY",
        "MILES_RUN_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "KEYBOARD",
    ],
)
def test_what_processes_need_is_left(name: str) -> None:
    assert not is_secret(name)


def test_what_is_started_inside_inherits_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "x")
    with pytest.raises(ZeroDivisionError), hidden_secrets():
        assert "HF_TOKEN" not in os.environ
        1 / 0  # noqa: B018
    assert os.environ["HF_TOKEN"] == "x"
