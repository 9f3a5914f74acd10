"""What a check is and what it finds; bounded, parallel running of many. Knows no particular check."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from milescli.core.errors import MilesError

SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
MASK = "***"
_CREDENTIALS = re.compile(r"//[^/@\s]+@")


class Status(StrEnum):
    """How it stands."""

    OK = "ok"
    WARN = "warn"
    """Runs will work, with a drawback."""
    FAIL = "fail"
    """Runs will not work."""
    SKIP = "skip"
    """Not checked, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    what: str
    why: str = ""
    fix: list[str] = field(default_factory=list)
    """Commands to paste; the best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question to the machine."""

    name: str
    run: Callable[[], list[Finding]]
    """Called in a thread of its own. A MilesError becomes a `fail`."""
    timeout_s: float = 30.0
    is_heavy: bool = False
    """Takes a core or more: few of these run at once."""


def ok(check: str, what: str) -> list[Finding]:
    """All is well."""
    return [Finding(check=check, status=Status.OK, what=what)]


def warn(check: str, what: str, *, why: str, fix: str | list[str]) -> list[Finding]:
    """It works, with a drawback."""
    return [Finding(check=check, status=Status.WARN, what=what, why=why, fix=[fix] if isinstance(fix, str) else fix)]


def fail(check: str, what: str, *, why: str, fix: str | list[str]) -> list[Finding]:
    """It does not work."""
    return [Finding(check=check, status=Status.FAIL, what=what, why=why, fix=[fix] if isinstance(fix, str) else fix)]


def skip(check: str, why: str) -> list[Finding]:
    """It was not tried."""
    return [Finding(check=check, status=Status.SKIP, what="not checked", why=why)]


def run_checks(checks: Sequence[Check], *, environ: Mapping[str, str], heavy_at_once: int = 1) -> list[Finding]:
    """All findings in the order of the checks, which run at once (of the heavy ones `heavy_at_once`), each bounded by its own
    time. A check that raises, or does not end, is a `fail`. Secrets of `environ` are masked."""
    places = threading.Semaphore(heavy_at_once)
    results: dict[str, list[Finding]] = {}
    threads = []
    for check in checks:
        thread = threading.Thread(target=_run_one, args=(check, results, places), name=f"doctor-{check.name}", daemon=True)
        thread.start()
        threads.append(thread)
    total_s = sum(check.timeout_s for check in checks if check.is_heavy) + max(
        (check.timeout_s for check in checks), default=0.0
    )
    deadline = time.monotonic() + total_s
    for check, thread in zip(checks, threads, strict=True):
        bound_s = deadline - time.monotonic() if check.is_heavy else min(check.timeout_s, deadline - time.monotonic())
        thread.join(max(0.0, bound_s))
    found = [finding for check in checks for finding in results.get(check.name) or _unanswered(check)]
    return [mask_secrets(finding, environ) for finding in found]


def mask_secrets(finding: Finding, environ: Mapping[str, str]) -> Finding:
    """The finding without secrets, as `mask` finds them."""
    cleaned = {name: mask(getattr(finding, name), environ) for name in ("what", "why")}
    return replace(finding, **cleaned, fix=[mask(each, environ) for each in finding.fix])


def mask(text: str, environ: Mapping[str, str]) -> str:
    """The text without the value of any variable whose name sounds like a secret, and without `user:password@` in addresses."""
    secrets = {
        value for name, value in environ.items() if len(value) >= 6 and any(word in name.upper() for word in SECRET_WORDS)
    }
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _CREDENTIALS.sub(f"//{MASK}@", text)


def _run_one(check: Check, results: dict[str, list[Finding]], places: threading.Semaphore) -> None:
    if check.is_heavy:
        with places:
            results[check.name] = _findings(check)
    else:
        results[check.name] = _findings(check)


def _findings(check: Check) -> list[Finding]:
    try:
        return check.run()
    except MilesError as error:
        return fail(check.name, error.what, why=error.why, fix=error.fixes)
    except Exception as error:  # a check that breaks has found something too
        return fail(
            check.name,
            "the check itself failed",
            why=f"{type(error).__name__}: {error}",
            fix="report this with the output of `miles doctor --json`",
        )


def _unanswered(check: Check) -> list[Finding]:
    return fail(
        check.name,
        "no answer",
        why=f"the check `{check.name}` did not end within {check.timeout_s:g} s",
        fix="miles doctor   # try again",
    )
