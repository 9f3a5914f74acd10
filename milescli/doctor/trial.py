"""Runs one trial of real parts (`trials`) in a separate process, with a time limit and a watchdog
that leaves nothing behind."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from milescli.cluster.watchdog import start_watchdog
from milescli.core.files import parse_json
from milescli.core.run_processes import TOKEN_VARIABLE
from milescli.doctor.finding import Finding, Status, fail, skip

NO_SETTINGS: Mapping[str, str] = {}
_LAST_LINES = 8
"""Number of lines of a failed trial's log, shown with the finding."""
_TRIAL_OF = {"weights": "engine", "trainer": "engine", "agreement": "engine", "links": "collective"}


def run_trial(
    check: str,
    *,
    device_kind: str,
    timeout_s: float,
    command: list[str] | None = None,
    names: tuple[str, ...] = (),
    environ: Mapping[str, str] = os.environ,
    settings: Mapping[str, str] = NO_SETTINGS,
) -> list[Finding]:
    """Run the trial `check` and return the findings that it writes as JSON lines. All processes
    that it started have ended when this returns.

    `command` replaces the trial's own command; `names` are the checks that it covers, if not only
    `check`; `environ` is its environment; `settings` are variables of this trial, which override
    those of every trial."""
    # short: socket names are bounded at 107 bytes
    folder = Path(tempfile.mkdtemp(prefix="miles-", dir="/tmp"))
    token = secrets.token_hex(16)
    watchdog = start_watchdog(token=token, scratch_dirs=[folder])
    own = [sys.executable, "-m", "milescli.doctor.trials", check, str(folder), device_kind]
    environment = {
        **environ,
        TOKEN_VARIABLE: token,
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder),
        **settings,
    }
    output, log = folder / "findings.jsonl", folder / "trial.log"
    try:
        ended = _run(command or own, environment, output=output, log=log, timeout_s=timeout_s)
        findings = _findings(output.read_text(encoding="utf-8", errors="replace"))
        there = {finding.check for finding in findings}
        missing = [name for name in names or (check,) if name not in there]
        if missing:
            findings.append(_broken_trial(missing[0], ended, log, device_kind))
        for name in missing[1:]:
            findings += skip(name, f"see `{missing[0]}` first")
        return findings
    finally:
        watchdog.release()


def _run(
    command: list[str], environment: dict[str, str], *, output: Path, log: Path, timeout_s: float
) -> str:
    """Run the command and return in words how it ended. Uses files, not pipes: a process that the
    trial left behind would hold a pipe open."""
    with output.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        try:
            return f"ended with status {process.wait(timeout_s)} and without output"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"did not finish within {timeout_s:g} s"


def _findings(text: str) -> list[Finding]:
    findings = []
    for line in text.splitlines():
        if line.startswith('{"check"'):
            raw = parse_json(line)
            findings.append(Finding(**{**raw, "status": Status(raw["status"])}))
    return findings


def _broken_trial(name: str, ended: str, log: Path, device_kind: str) -> Finding:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    why = f"the trial {ended}; its last output:\n" + (
        "\n".join(f"  | {line}" for line in lines) or "  (none)"
    )
    return fail(
        name,
        "does not work here",
        why=why,
        fix=f"{sys.executable} -m milescli.doctor.trials {_TRIAL_OF.get(name, name)} $(mktemp "
        f"-d) {device_kind}   # shows its output",
    )[0]
