"""The watchdog: whatever becomes of the driver, its processes go, and only its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from milescli.cluster.watchdog import (
    Watchdog,
    clean_up_without_watchdog,
    is_watching,
    start_watchdog,
)
from milescli.core.run_processes import TOKEN_VARIABLE, cpu_seconds, processes_of
from tests.waiting import runs, until

DRIVER = textwrap.dedent(
    """
    import os, subprocess, sys, time
    from pathlib import Path
    from milescli.cluster.watchdog import start_watchdog
    from milescli.core.run_processes import TOKEN_VARIABLE
    token, scratch, verdict = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    os.environ[TOKEN_VARIABLE] = token
    start_watchdog(token=token, scratch_dirs=[scratch]).write_verdict_to(verdict)
    child = subprocess.Popen(
        [sys.executable, "-c", sys.argv[4]], stdout=subprocess.PIPE, start_new_session=True
    )
    child.stdout.readline()
    print(child.pid, flush=True)
    time.sleep(600)
    """
)
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""
"""A child of the driver that does not end when it is asked to."""


def test_a_process_may_have_any_name(tmp_path: Path) -> None:
    program = tmp_path / "проверка_ответов"  # the kernel cuts it within a character
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    process = subprocess.Popen([program, "600"], env={TOKEN_VARIABLE: "of-any-name"})
    try:
        until(lambda: Path(f"/proc/{process.pid}/comm").read_bytes().startswith("п".encode()))
        assert [*processes_of("of-any-name")] == [process.pid]
        assert cpu_seconds(process.pid) >= 0.0
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bystander():
    """A process of somebody else, which must survive."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_killed_driver_leaves_nothing_of_its_own_and_everything_of_others(
    tmp_path: Path, bystander
) -> None:
    scratch, verdict = tmp_path / "scratch", tmp_path / "verdict.json"
    scratch.mkdir()
    (scratch / "file").write_text("x")
    token = f"test-{os.getpid()}-{time.monotonic_ns()}"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, token, str(scratch), str(verdict), STUBBORN],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    child = int(driver.stdout.readline())
    assert runs(child)
    leftover = Path(f"/dev/shm/torch_{child}_1_0")
    leftover.write_bytes(b"x")
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    until(lambda: not runs(child)), ("a child that ignores SIGTERM outlived the driver")
    until(lambda: not scratch.exists() and verdict.exists())
    assert json.loads(verdict.read_text())["outcome"] == "killed"
    assert not leftover.exists()
    assert bystander.poll() is None


def test_what_a_killed_rank_shared_goes_while_the_run_goes_on(tmp_path: Path) -> None:
    """A run outlives its trainer ranks: each that was killed would leave two buckets of weights."""
    token = f"test-{os.getpid()}-{time.monotonic_ns()}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env={**os.environ, TOKEN_VARIABLE: token},
        )
        for _ in range(2)
    ]
    files = [Path(f"/dev/shm/miles_{rank.pid}_0") for rank in ranks]
    for file in files:
        file.write_bytes(b"x")
    until(lambda: {rank.pid for rank in ranks} <= set(processes_of(token)))
    watchdog = start_watchdog(token=token, scratch_dirs=[])
    watchdog.write_verdict_to(tmp_path / "verdict.json")
    seen = tmp_path / "memory.jsonl"
    until(lambda: seen.exists() and str(ranks[0].pid) in seen.read_text())
    ranks[0].kill()
    until(lambda: not files[0].exists(), "though nobody has reaped it")
    assert files[1].exists()
    watchdog.release()
    assert not files[1].exists()
    for rank in ranks:
        rank.wait(60)


def test_release_waits_for_the_clean_up_and_keeps_the_drivers_own_verdict(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    verdict.write_text('{"outcome": "done"}\n')
    token = f"test-{os.getpid()}-{time.monotonic_ns()}"
    watchdog = start_watchdog(token=token, scratch_dirs=[])
    watchdog.write_verdict_to(verdict)
    own = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not any("milescli.cluster.watchdog" in line for line in own), (
        "whoever kills our children would kill the watchdog"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, TOKEN_VARIABLE: token},
    )
    until(lambda: child.pid in set(processes_of(token)))
    watchdog.release()
    assert child.wait(60) == -signal.SIGTERM
    assert json.loads(verdict.read_text())["outcome"] == "done"


def test_another_runs_token_is_not_ours() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, TOKEN_VARIABLE: "abc-longer"},
    )
    try:
        until(lambda: child.pid in set(processes_of("abc-longer")))
        assert child.pid not in set(processes_of("abc"))
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_watchdog_that_dies_or_is_held_has_a_successor_that_knows_what_it_knew(
    tmp_path: Path, harm: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, verdict, pids = tmp_path / "scratch", tmp_path / "verdict.json", list[int]()
    scratch.mkdir()
    token = f"test-{os.getpid()}-{time.monotonic_ns()}"
    begin = Watchdog._start

    def begin_and_tell(watchdog: Watchdog) -> None:
        begin(watchdog)
        pids.append(watchdog._pid)

    monkeypatch.setattr(Watchdog, "_start", begin_and_tell)
    watchdog = start_watchdog(token=token, scratch_dirs=[scratch])
    watchdog.write_verdict_to(verdict)
    os.kill(pids[0], harm)
    until(lambda: watchdog.num_replaced == 1)
    assert not is_watching(pids[0]) and is_watching(pids[1])
    os.kill(pids[1], harm)  # and at once the driver ends
    verdict.write_text('{"outcome": "done"}\n')
    watchdog.release()
    assert not scratch.exists()
    assert len(pids) == 3 and not any(map(is_watching, pids))


def test_where_driver_and_watchdog_died_another_cleans_up(tmp_path: Path) -> None:
    scratch, verdict = tmp_path / "scratch", tmp_path / "verdict.json"
    scratch.mkdir()
    token = f"test-{os.getpid()}-{time.monotonic_ns()}"
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, TOKEN_VARIABLE: token},
    )
    until(lambda: child.pid in set(processes_of(token)))
    clean_up_without_watchdog(token=token, scratch_dirs=[scratch], verdict=verdict)
    assert child.wait(60) == -signal.SIGTERM
    assert not scratch.exists() and json.loads(verdict.read_text())["outcome"] == "killed"
