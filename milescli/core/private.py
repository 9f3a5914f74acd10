"""Keeps secrets and private paths out of the environment of processes that do not need them, and
out of published texts: model cards and reports. Works on names and texts only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SMTP_PASSWORD = "MILES_SMTP_PASSWORD"
"""Variable with the password of the mail server that sends alerts."""
SECRET_WORDS = frozenset(
    {
        "KEY",
        "APIKEY",
        "TOKEN",
        "SECRET",
        "PASSWORD",
        "PASSWD",
        "PASSPHRASE",
        "CREDENTIALS",
        "PAT",
        "WEBHOOK",
        "COOKIE",
        "AUTHORIZATION",
    }
)
"""Parts of names, between underscores, that mark a secret: TOKENIZERS_PARALLELISM or NCCL_IB_PKEY
do not count."""
RUN_PREFIXES = ("MILES_", "RAY_")
"""Prefixes of variables that the run itself and Ray use."""


def is_secret(name: str) -> bool:
    """Return True if the name is that of a secret: WANDB_API_KEY, HF_TOKEN, db_password."""
    is_ours = name.startswith(RUN_PREFIXES) and name != SMTP_PASSWORD
    return not is_ours and not SECRET_WORDS.isdisjoint(name.upper().split("_"))


def holds_secret(value: str) -> bool:
    """Return True if a text holds a secret, whatever its name: a token of a known form, a URL with
    a password, a webhook, a private key."""
    return any(form.search(value) for form in (_TOKENS, _PASSWORD, _WEBHOOK, _PRIVATE_KEY))


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that needs no secrets: without secret variables."""
    return {name: value for name, value in environ.items() if not _is_hidden(name, value)}


def secrets_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `without_secrets` leaves out."""
    return {name: value for name, value in environ.items() if _is_hidden(name, value)}


def _is_hidden(name: str, value: str) -> bool:
    return is_secret(name) or (not name.startswith(RUN_PREFIXES) and holds_secret(value))


@contextmanager
def hidden_secrets() -> Iterator[None]:
    """Hide this process's secrets from processes that are started within the block."""
    hidden = secrets_of(os.environ)
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


SHORTEST_SECRET = 6
"""Characters; a shorter value occurs in many texts by chance."""


def without_secret_values(text: str, environ: Mapping[str, str]) -> str:
    """Replace the values of secret variables by their names: exceptions and output of libraries may
    quote the key that they received."""
    for name, value in environ.items():
        if is_secret(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, f"${name}")
    return text


REMOVED = "[removed]"
_TOKENS = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{12,}"
    r"|github_pat_\w{20,}|xox[abp]-[A-Za-z0-9-]{10,}|glpat-[\w-]{16,}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)\b"
)
_WEBHOOK = re.compile(
    r"(?<=://)(hooks\.slack\.com/(services|workflows|triggers)|(\w+\.)*discord(app)?\.com/api/webhooks"
    r"|[\w.-]+\.webhook\.office\.com)/(?!\S*\$)[^\s\"']+"  # a variable is no secret
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_LOGIN = re.compile(r"(?<=://)[^/\s:@]+(:[^/\s@]*)?@")
_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+@")
_HOMES = re.compile(r"(?<![\w/.])/(?:home|Users)/[\w.-]+(?=/|\b)")
_MAIL = re.compile(r"(?<=mailto:)[^\s\"'\],]+")
_PATH = re.compile(r"(?<![\w./:~…-])~?(?:/[\w.@+%=,-]+){2,}/?|(?<![\w./:~…-])/root\b")
_NOT_SECRET = ("prompt_key", "label_key", "response_key")
"""Recipe keys that name columns of data."""


def without_private(text: str) -> str:
    """Return the text without anything that looks like a token, a login of a URL, a webhook, or a
    path within a user's home."""
    text = _WEBHOOK.sub(REMOVED, _LOGIN.sub("", _TOKENS.sub(REMOVED, text)))
    home = Path.home()
    if home != home.parent:  # a service may have the root as its home
        text = text.replace(f"{home}/", "~/")
    return _HOMES.sub("~", text)


def without_paths(text: str) -> str:
    """Return the text as `without_private` does, without mail addresses, and with only the last
    part of each absolute path, behind an ellipsis: the rest is useless on another machine."""
    return _PATH.sub(_last_part, _MAIL.sub(REMOVED, without_private(text)))


def without_secrets_in(value: object, *, name: str = "") -> object:
    """Return a value of a recipe in a form that may be shown; `name` is its key. Replaces each
    secret, at any depth, by `[removed]`."""
    if isinstance(value, Mapping):
        return {key: without_secrets_in(item, name=str(key)) for key, item in value.items()}
    last = name.rpartition(".")[2].replace("-", "_")
    if value is not None and is_secret(last) and last not in _NOT_SECRET:
        return REMOVED
    if isinstance(value, list | tuple):
        return [without_secrets_in(item) for item in value]
    return without_paths(value) if isinstance(value, str) else value


def _last_part(match: re.Match[str]) -> str:
    parts = match[0].rstrip("/").rsplit("/", 1)
    return f"…/{parts[-1]}"
