"""Takes secrets out of what the doctor says. Knows names of variables and forms of addresses;
pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from milescli.doctor.finding import Finding

SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL")
MASK = "***"
SHORTEST = 6
"""A shorter value is left where it stands in a text: it would match inside many words. Alone, it is
masked too."""
SHORTEST_PASSWORD = 3
"""The same of a password in an address, which is looked for as it stands."""
_USER = re.compile(r"//[^/\s]+@")
"""Up to the last @ before the path: passwords may hold one."""
_QUERY = re.compile(
    r"([?&;][^=&\s]*(?:key|token|secret|sig|passw|credential)[^=&\s]*=)[^&\s]+", re.IGNORECASE
)


def sounds_secret(name: str) -> bool:
    """Of a variable: WANDB_API_KEY, HF_TOKEN, db_password."""
    return any(word in name.upper() for word in SECRET_WORDS)


def mask(text: str, environ: Mapping[str, str]) -> str:
    """The text without the value of any variable whose name sounds like a secret, and without
    `user:password@` and `?token=` of addresses."""
    secrets = {
        value for name, value in environ.items() if len(value) >= SHORTEST and sounds_secret(name)
    }
    secrets |= {password for value in environ.values() for password in _passwords(value)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(f"//{MASK}@", text))


def _passwords(value: str) -> list[str]:
    """Of the addresses in a variable: libraries show them in pieces, too."""
    passwords = [
        user.removeprefix("//").removesuffix("@").partition(":")[2] for user in _USER.findall(value)
    ]
    return [password for password in passwords if len(password) >= SHORTEST_PASSWORD]


def mask_secrets(finding: Finding, environ: Mapping[str, str]) -> Finding:
    """The finding without secrets, as `mask` finds them."""
    cleaned = {name: mask(getattr(finding, name), environ) for name in ("what", "why")}
    return replace(finding, **cleaned, fix=[mask(command, environ) for command in finding.fix])


def mask_environment(environ: Mapping[str, str], *, prefixes: tuple[str, ...]) -> dict[str, str]:
    """The variables that begin so, sorted; those that sound secret are there, and their values are
    not."""
    chosen = {name: value for name, value in sorted(environ.items()) if name.startswith(prefixes)}
    return {
        name: MASK if sounds_secret(name) else mask(value, environ)
        for name, value in chosen.items()
    }
