"""Checks and findings, and a runner that executes many checks in parallel with time limits. Knows
no particular check."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum

from milescli.core.errors import MilesError

REPORT = "miles doctor --json > doctor.json   # a fault of miles: please report it with this file"
GRACE_S = 1.0
"""Seconds for threads to return their findings after their time limit."""


class Status(StrEnum):
    """Names the outcomes of a check."""

    OK = "ok"
    WARN = "warn"
    """Runs will work, with a drawback."""
    FAIL = "fail"
    """Runs will not work."""
    SKIP = "skip"
    """Not checked; `why` has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Holds the result of one check."""

    check: str
    status: Status
    what: str
    why: str = ""
    fix: list[str] = field(default_factory=list)
    """Commands to paste, the best one first."""
    node: str = ""
    """Address of the cluster node that it concerns; empty: this machine, or the cluster as a
    whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Describes one check of the machine."""

    name: str
    run: Callable[[], list[Finding]]
    """Runs in a thread of its own. A MilesError becomes a `fail`."""
    timeout_s: float = 30.0
    """Time limit from the start of the check, which waits for the checks that it needs and for
    other heavy ones."""
    is_heavy: bool = False
    """True if it takes a core or more: few of these run at the same time."""
    needs: tuple[str, ...] = ()
    """Checks that must not fail, else this one is skipped: a fault is reported only once."""


def ok(check: str, what: str) -> list[Finding]:
    """Return a finding that everything works."""
    return [Finding(check=check, status=Status.OK, what=what)]


def warn(check: str, what: str, *, why: str, fix: str | list[str], node: str = "") -> list[Finding]:
    """Return a finding that something works, with a drawback."""
    fixes = [fix] if isinstance(fix, str) else fix
    return [Finding(check=check, status=Status.WARN, what=what, why=why, fix=fixes, node=node)]


def fail(check: str, what: str, *, why: str, fix: str | list[str], node: str = "") -> list[Finding]:
    """Return a finding that something does not work."""
    [finding] = warn(check, what, why=why, fix=fix, node=node)
    return [replace(finding, status=Status.FAIL)]


def failed(check: str, error: MilesError, *, node: str = "") -> list[Finding]:
    """Return a `fail` with what, why and fix of the error."""
    return fail(check, error.what, why=error.why, fix=error.fixes, node=node)


def judge_amount(
    check: str,
    what: str,
    amount: float,
    *,
    needed: tuple[float, str],
    wanted: tuple[float, str],
    fix: str | list[str],
) -> list[Finding]:
    """Return a finding that depends on an amount: `needed` and `wanted` are amounts, each with the
    reason why less does not work, or works with a drawback."""
    for judge, (bound, why) in ((fail, needed), (warn, wanted)):
        if amount < bound:
            return judge(check, what, why=why, fix=fix)
    return ok(check, what)


def skip(check: str, why: str) -> list[Finding]:
    """Return a finding that something was not checked."""
    return [Finding(check=check, status=Status.SKIP, what="not checked", why=why)]


Watch = Callable[[Callable[[], str]], AbstractContextManager[None]]
"""Returns a context that displays what the function returns."""


def run_checks(
    checks: Sequence[Check], *, heavy_at_once: int = 1, watch: Watch | None = None
) -> list[Finding]:
    """Run the checks at the same time (of the heavy ones `heavy_at_once`, the longest first), each
    with its own time limit, and return their findings in the order of the checks. A check that
    raises, or does not end, becomes a `fail`. `watch` shows how many are done."""
    places = threading.Semaphore(heavy_at_once)
    tasks = {check.name: _RunningCheck(check) for check in checks}
    for task in sorted(tasks.values(), key=lambda task: -task.check.timeout_s):
        before = [tasks[name] for name in task.check.needs if name in tasks]
        threading.Thread(
            target=task.run, args=(before, places), name=f"doctor-{task.check.name}", daemon=True
        ).start()
    running = list(tasks.values())
    with watch(lambda: _progress(running)) if watch else nullcontext():
        return [finding for task in running for finding in task.result()]


def _progress(tasks: Sequence[_RunningCheck]) -> str:
    """Return a line such as `12 of 14 checks done; engine, collective (waits)`."""
    left = [
        task.check.name + " (waits)" * (not task.began.is_set())
        for task in tasks
        if not task.ended.is_set()
    ]
    return f"{len(tasks) - len(left)} of {len(tasks)} checks done; {', '.join(left)}"


class _RunningCheck:
    """Runs one check. The main thread calls `result`, the check's own thread everything else."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.began = threading.Event()
        self.ended = threading.Event()
        self.findings: list[Finding] = []
        self.deadline = float("inf")

    def run(self, before: Sequence[_RunningCheck], places: threading.Semaphore) -> None:
        broken = [
            task.check.name
            for task in before
            if any(finding.status is Status.FAIL for finding in task.result())
        ]
        if broken:
            self._begin()
            self._end(skip(self.check.name, f"see `{broken[0]}` first"))
            return
        if not self.check.is_heavy:
            self._begin()
            self._end(_findings(self.check))
            return
        with places:
            self._begin()
            worker = threading.Thread(target=lambda: self._end(_findings(self.check)), daemon=True)
            worker.start()
            worker.join(
                self.check.timeout_s + GRACE_S
            )  # one that hangs gives its place to the next

    def result(self) -> list[Finding]:
        """Wait until the check ends, or until its time limit after its start. The checks before it
        have time limits too."""
        self.began.wait()
        if self.ended.wait(max(0.0, self.deadline - time.monotonic())):
            return self.findings
        return fail(
            self.check.name,
            "no answer",
            why=f"the check `{self.check.name}` did not finish within {self.check.timeout_s:g} s",
            fix="miles doctor   # try again",
        )

    def _begin(self) -> None:
        self.deadline = time.monotonic() + self.check.timeout_s
        self.began.set()

    def _end(self, findings: list[Finding]) -> None:
        self.findings = findings
        self.ended.set()


def _findings(check: Check) -> list[Finding]:
    try:
        return check.run()
    except MilesError as error:
        return failed(check.name, error)
    # a check that breaks has found something too; a module of the user's may even call sys.exit
    except BaseException as error:
        return fail(
            check.name,
            "the check itself failed",
            why=f"{type(error).__name__}: {error}",
            fix=REPORT,
        )
