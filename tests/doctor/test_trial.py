"""Tests of running a trial in a process of its own: faults of the process, and that nothing is left
behind."""

from __future__ import annotations

import sys
from pathlib import Path

from milescli.doctor.finding import Status
from milescli.doctor.trial import run_trial
from tests.waiting import assert_gone


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_trial_that_says_nothing_is_a_fail_with_its_last_words() -> None:
    command = _python("import sys; print('it broke here', file=sys.stderr); sys.exit(3)")
    finding = run_trial("ray", device_kind="cpu", timeout_s=120.0, command=command)[0]
    assert (finding.check, finding.status) == ("ray", Status.FAIL)
    assert "ended with status 3" in finding.why and "| it broke here" in finding.why


def test_a_trial_that_hangs_is_a_fail_and_what_it_started_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        f"import subprocess, time; p = subprocess.Popen(['sleep', '600']); open({str(note)!r}, "
        "'w').write(str(p.pid)); time.sleep(600)"
    )
    findings = run_trial(
        "engine",
        device_kind="cpu",
        timeout_s=10.0,
        command=_python(code),
        names=("engine", "weights"),
    )
    assert [(finding.check, finding.status) for finding in findings] == [
        ("engine", Status.FAIL),
        ("weights", Status.SKIP),
    ]
    assert "did not finish within 10 s" in findings[0].why
    assert_gone(int(note.read_text()))


def test_findings_of_a_trial_are_read_and_what_it_left_out_is_a_fail() -> None:
    line = '{"check": "engine", "status": "ok", "what": "fine", "why": "", "fix": []}'
    command = _python(f"print('noise'); print({line!r})")
    findings = run_trial(
        "engine", device_kind="cpu", timeout_s=120.0, command=command, names=("engine", "weights")
    )
    assert [(finding.check, finding.status) for finding in findings] == [
        ("engine", Status.OK),
        ("weights", Status.FAIL),
    ]


def test_the_collective_works_on_this_machine() -> None:
    finding = run_trial("collective", device_kind="cpu", timeout_s=120.0)[0]
    assert (finding.status, finding.what[:4]) == (Status.OK, "gloo"), finding
