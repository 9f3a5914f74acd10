"""Tests of running checks: bounded, in order, never breaking, each fault reported once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from milescli.core.errors import MachineError
from milescli.doctor.finding import Check, Finding, Status, fail, ok, run_checks
from tests.waiting import until


def _run(*checks: Check) -> list[Finding]:
    return run_checks(checks)


def test_findings_come_in_the_order_of_the_checks_whatever_ends_first() -> None:
    second_done = threading.Event()

    def first() -> list[Finding]:
        assert second_done.wait(120)
        return ok("first", "a")

    def second() -> list[Finding]:
        second_done.set()
        return ok("second", "b")

    assert [
        finding.check
        for finding in _run(Check(name="first", run=first), Check(name="second", run=second))
    ] == [
        "first",
        "second",
    ]


def test_an_error_of_ours_is_a_fail_with_its_three_parts() -> None:
    def broken() -> list[Finding]:
        raise MachineError("w", why="y", fix=["f", "g"])

    assert _run(Check(name="x", run=broken)) == [
        Finding(check="x", status=Status.FAIL, what="w", why="y", fix=["f", "g"])
    ]


def test_a_check_that_breaks_is_a_fail_and_the_others_go_on() -> None:
    findings = _run(
        Check(name="x", run=lambda: 1 / 0), Check(name="y", run=lambda: ok("y", "fine"))
    )  # type: ignore[arg-type,return-value]
    assert [finding.status for finding in findings] == [Status.FAIL, Status.OK]
    assert "ZeroDivisionError" in findings[0].why


def test_a_check_that_hangs_is_a_fail() -> None:
    never = threading.Event()
    findings = _run(Check(name="x", run=lambda: ok("x", str(never.wait())), timeout_s=0.05))
    assert (findings[0].status, findings[0].what) == (Status.FAIL, "no answer")
    never.set()


def test_heavy_checks_take_turns() -> None:
    running = threading.Semaphore(1)

    def heavy(name: str) -> list[Finding]:
        assert running.acquire(blocking=False), "two at once"
        threading.Event().wait(0.02)
        running.release()
        return ok(name, "alone")

    names = ["a", "b", "c"]
    checks = [Check(name=name, run=lambda name=name: heavy(name), is_heavy=True) for name in names]  # type: ignore[misc]
    assert [finding.what for finding in _run(*checks)] == ["alone"] * 3


def test_what_hangs_holds_up_neither_those_beside_it_nor_the_heavy_ones_after_it() -> None:
    never = threading.Event()
    hung = [
        Check(name=name, run=lambda: ok("x", str(never.wait())), timeout_s=0.1, is_heavy=True)
        for name in "abc"
    ]
    findings = _run(*hung, Check(name="last", run=lambda: ok("last", "ran"), is_heavy=True))
    assert [finding.what for finding in findings] == ["no answer"] * 3 + ["ran"]
    never.set()


def test_a_check_is_skipped_where_one_that_it_needs_fails_so_that_a_fault_is_reported_once() -> (
    None
):
    ran: list[str] = []

    def touch(name: str) -> list[Finding]:
        ran.append(name)
        return ok(name, "ran")

    findings = _run(
        Check(name="plan", run=lambda: touch("plan"), needs=("reward",)),
        Check(name="reward", run=lambda: fail("reward", "broken", why="y", fix="f")),
        Check(name="data", run=lambda: touch("data"), needs=("platform", "not asked")),
        Check(name="platform", run=lambda: touch("platform")),
    )
    assert [finding.status for finding in findings] == [
        Status.SKIP,
        Status.FAIL,
        Status.OK,
        Status.OK,
    ]
    assert "`reward`" in findings[0].why and ran == ["platform", "data"]


def test_a_check_whose_module_calls_exit_is_a_fail_and_not_the_end_of_the_doctor() -> None:
    findings = _run(Check(name="reward", run=lambda: sys.exit(3)))
    assert findings[0].status is Status.FAIL and "SystemExit" in findings[0].why


def test_somebody_who_watches_sees_what_is_left() -> None:
    may_end, said = threading.Event(), list[str]()

    def slow() -> list[Finding]:
        assert may_end.wait(120)
        return ok("slow", "a")

    @contextmanager
    def watch(progress: Callable[[], str]) -> Iterator[None]:
        until(lambda: progress().startswith("1 of 3 checks done"))
        said.append(progress())
        may_end.set()
        yield
        said.append(progress())

    checks = [
        Check(name="quick", run=lambda: ok("quick", "b")),
        Check(name="slow", run=slow, is_heavy=True),
        Check(name="last", run=lambda: ok("last", "c"), needs=("slow",)),
    ]
    assert len(run_checks(checks, watch=watch)) == 3
    assert said == ["1 of 3 checks done; slow, last (waits)", "3 of 3 checks done; "]
