"""Tests of running checks: bounded, in order, never breaking, never telling a secret."""

from __future__ import annotations

import threading

from milescli.core.errors import MachineError
from milescli.doctor.finding import Check, Finding, Status, fail, mask_secrets, ok, run_checks


def _run(*checks: Check, **environ: str) -> list[Finding]:
    return run_checks(checks, environ=environ)


def test_findings_come_in_the_order_of_the_checks_whatever_ends_first() -> None:
    second_done = threading.Event()

    def first() -> list[Finding]:
        assert second_done.wait(30)
        return ok("first", "a")

    def second() -> list[Finding]:
        second_done.set()
        return ok("second", "b")

    assert [each.check for each in _run(Check(name="first", run=first), Check(name="second", run=second))] == [
        "first",
        "second",
    ]


def test_an_error_of_ours_is_a_fail_with_its_three_parts() -> None:
    def broken() -> list[Finding]:
        raise MachineError("w", why="y", fix=["f", "g"])

    assert _run(Check(name="x", run=broken)) == [Finding(check="x", status=Status.FAIL, what="w", why="y", fix=["f", "g"])]


def test_a_check_that_breaks_is_a_fail_and_the_others_go_on() -> None:
    found = _run(Check(name="x", run=lambda: 1 / 0), Check(name="y", run=lambda: ok("y", "fine")))  # type: ignore[arg-type,return-value]
    assert [each.status for each in found] == [Status.FAIL, Status.OK]
    assert "ZeroDivisionError" in found[0].why


def test_a_check_that_hangs_is_a_fail() -> None:
    never = threading.Event()
    found = _run(Check(name="x", run=lambda: ok("x", str(never.wait())), timeout_s=0.05))
    assert (found[0].status, found[0].what) == (Status.FAIL, "no answer")
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
    assert [each.what for each in _run(*checks)] == ["alone"] * 3


def test_no_secret_is_told() -> None:
    environ = {"WANDB_API_KEY": "sk-12345678", "HF_TOKEN": "hf_abcdef", "db_password": "hunter22", "HOME": "/home/me"}
    found = mask_secrets(fail("x", "sk-12345678", why="hf_abcdef in /home/me", fix="login hunter22")[0], environ)
    assert (found.what, found.why, found.fix) == ("***", "*** in /home/me", ["login ***"])


def test_short_values_are_not_masked_for_they_are_no_secrets() -> None:
    assert mask_secrets(ok("x", "1 of 2")[0], {"USE_TOKENS": "1"}).what == "1 of 2"
