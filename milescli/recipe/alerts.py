"""Defines the syntax of `run.alerts` and `run.alerts_on`: who gets an alert when a run ends, fails
or stalls. The recipe is written into the run's folder, so an address that contains a secret must be
given as an environment variable. Sends nothing (`trackers.alerts` does)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from milescli.core.private import REMOVED, without_private
from milescli.recipe.machine import RunSettings
from milescli.recipe.section import Rule

KEY, KEY_ON = "run.alerts", "run.alerts_on"
MOMENTS = ("end", "failure", "stop", "stall")
"""Events of a run; `run.alerts_on` may also name diagnoses of docs/verdict.md."""
MAILTO = "mailto:"
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_NAMED = re.compile(r"\$(?:\{\w+\}|\w+)\Z")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MAIL = re.compile(r"[^\s@,?]+@[^\s@,?]+(?:,[^\s@,?]+@[^\s@,?]+)*\Z")
_SECRET_NAME = re.compile(r"key|token|secret|sig|pass|auth|code|cred", re.IGNORECASE)
_TOKEN = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.:~@%=+-]{16,}\Z")
"""Pattern of a part of a URL that looks random, like a secret."""
_SECRET_HOSTS = (
    "hooks.slack.com",
    "discord.com",
    "discordapp.com",
    "webhook.office.com",
    "logic.azure.com",
    "chat.googleapis.com",
    "api.telegram.org",
    "hc-ping.com",
)
"""Hosts whose webhook URLs are secret as a whole."""
EXAMPLE = "ALERT_WEBHOOK"
"""Example variable; `core.private` counts a name like this as that of a secret."""


class Kind(StrEnum):
    """Names the ways in which an alert is sent."""

    WEBHOOK = "webhook"
    MAIL = "mail"
    COMMAND = "command"
    VARIABLE = "variable"
    """An environment variable that holds the whole address of a webhook or a mail."""


def kind_of(entry: str) -> Kind:
    """Return how an entry of `run.alerts` is sent."""
    if _NAMED.match(entry):
        return Kind.VARIABLE
    if entry.startswith(MAILTO):
        return Kind.MAIL
    return Kind.WEBHOOK if entry.startswith(("http://", "https://")) else Kind.COMMAND


def shown(entry: str) -> str:
    """Return an entry as logs and events show it: the host of a URL, the name of a command."""
    kind = kind_of(entry)
    if kind is Kind.WEBHOOK:
        parts = urlsplit(entry)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" + "/…" * bool(parts.path)
    return shlex.split(entry)[0] if kind is Kind.COMMAND else entry


def describe_alerts(settings: RunSettings) -> str:
    """Describe in a line who gets an alert on which events: `$ALERT_WEBHOOK, on end, failure`.
    Return an empty text if nobody does."""
    if not settings.alerts or not settings.alerts_on:
        return ""
    who = ", ".join(shown(entry) for entry in dict.fromkeys(settings.alerts))
    return f"{who}, on {', '.join(settings.alerts_on)}"


def variables_of(entry: str) -> list[str]:
    """Return the environment variables that an address names. A command has none: it inherits the
    environment, and others can read its arguments."""
    if kind_of(entry) is Kind.COMMAND:
        return []
    return [whole or short for whole, short in _VARIABLE.findall(entry)]


def expand_variables(entry: str, environ: Mapping[str, str]) -> str:
    """Return an address with the values of its variables. Raises KeyError with the name of a
    variable that is missing or empty."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environ.get(name):
            raise KeyError(name)
        return environ[name]

    return entry if kind_of(entry) is Kind.COMMAND else _VARIABLE.sub(value, entry).strip()


def with_absolute_commands(entries: list[str]) -> list[str]:
    """Return the entries with absolute paths for commands that are files in this folder; return the
    list itself if nothing changes."""
    return (
        list(map(_with_absolute_command, entries)) if any(map(_is_relative, entries)) else entries
    )


def _is_relative(entry: str) -> bool:
    if kind_of(entry) is not Kind.COMMAND:
        return False
    program = Path(shlex.split(entry)[0])
    return not program.is_absolute() and (len(program.parts) > 1 or entry.startswith("./"))


def _with_absolute_command(entry: str) -> str:
    if not _is_relative(entry):
        return entry
    program, *words = shlex.split(entry)
    return shlex.join([str(Path(program).absolute()), *words])


def fault_of(address: str) -> str:
    """Return what is wrong with an address; empty if it is valid. Never quotes the address."""
    if address.startswith(MAILTO):
        is_right = _MAIL.match(address.removeprefix(MAILTO)) is not None
        return "" if is_right else "an e-mail is written mailto:me@example.org"
    try:
        parts = urlsplit(address)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_right = is_right and (parts.port is None or parts.port > 0) and not _has_blank(address)
    except ValueError:
        is_right = False
    return "" if is_right else "an address is http://..., https://... or mailto:..."


def rules(settings: RunSettings) -> Iterator[Rule]:
    """Yield the rules for the alerts of a run. Their messages show nothing that may be a secret."""
    for entry in settings.alerts:
        yield from _rules_of(entry)
    for name in settings.alerts_on:
        yield Rule(
            re.fullmatch(r"[a-z]+(-[a-z]+)*", name) is None,
            f"`{KEY_ON}` cannot be `{name}`",
            why=f"it lists {', '.join(MOMENTS)}, and names of diagnoses",
            fix=f"--set {KEY_ON}=[{','.join(MOMENTS)}]",
        )


def _rules_of(entry: str) -> Iterator[Rule]:
    kind = kind_of(entry)
    yield Rule(
        not entry.strip(),
        f"`{KEY}` has an entry that is empty",
        why="each is a URL, a command or mailto:...",
        fix=f"--set {KEY}=[]",
    )
    scheme = _SCHEME.match(entry)
    yield Rule(
        kind is Kind.COMMAND and (scheme is not None or _MAIL.match(entry) is not None),
        f"`{KEY}` has an address of an unknown kind",
        why=f"{scheme[1]}:// is not sent to" if scheme else "an e-mail begins with mailto:",
        fix=f"--set {KEY}=[https://ntfy.sh/my-runs]"
        if scheme
        else f"--set {KEY}=[{MAILTO}{entry}]",
    )
    yield Rule(
        _holds_secret(entry),
        f"`{KEY}` holds a secret",
        why=f"{_holder_of(entry, kind)} would be written into the run's folder: secrets come from "
        "the environment, and the recipe names the variable",
        fix=[
            f"export {EXAMPLE}=...   # the whole URL; then --set '{KEY}=[${EXAMPLE}]'"
            if kind is Kind.WEBHOOK
            else "export ALERT_TOKEN=...   # which the command inherits, and reads by itself",
        ],
    )
    fault = ""
    if kind is Kind.COMMAND:
        fault = _fault_of_command(entry)
    elif kind is not Kind.VARIABLE:
        fault = fault_of(_VARIABLE.sub("x", entry))
    yield Rule(
        fault,
        f"`{KEY}` has an entry that cannot be read",
        why=fault,
        fix=f"--set '{KEY}=[https://ntfy.sh/my-runs]'",
    )


def _holder_of(entry: str, kind: Kind) -> str:
    if kind is not Kind.WEBHOOK:
        return "the command"
    return f"the URL at {entry.split('/')[2].rpartition('@')[2]}"


def _fault_of_command(entry: str) -> str:
    try:
        words = shlex.split(entry)
    except ValueError as error:
        return f"the command has an open quotation: {error}"
    return "" if words else "the command is empty"


def _holds_secret(entry: str) -> bool:
    words = entry.split()
    return REMOVED in without_private(entry) or any(
        _is_secret_url(word.strip("'\"")) for word in words if "://" in word
    )


def _is_secret_url(url: str) -> bool:
    """Return True if the URL alone lets its reader send to it, or log in. The values of variables
    are not read."""
    try:
        parts = urlsplit(_VARIABLE.sub("", url))
    except ValueError:
        return False
    host = parts.hostname or ""
    is_of_service = any(host == one or host.endswith(f".{one}") for one in _SECRET_HOSTS)
    queries = [pair for pair in parse_qsl(parts.query) if pair[1]]
    return (
        "@" in parts.netloc
        or (is_of_service and not _VARIABLE.search(url))
        or any(_TOKEN.match(part) for part in parts.path.split("/"))
        or any(_SECRET_NAME.search(name) or _TOKEN.match(value) for name, value in queries)
    )


def _has_blank(address: str) -> bool:
    return any(letter.isspace() or not letter.isprintable() for letter in address)
