"""Ray's own processes, as far as their death is noticed: real processes, and no Ray."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from milescli.backends.ray import session_processes
from milescli.backends.ray.session_processes import SessionProcesses
from milescli.core.errors import WorkerDied
from tests.waiting import BOUND_S, until_async


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not ended where a busy machine hangs longer than the program waits."""
    monkeypatch.setattr(session_processes, "END_WITHIN_S", 60.0)


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"])


def test_the_first_that_dies_is_named_with_its_signal_and_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "gcs_server.err").write_text("check failed\n")
    (tmp_path / "gcs_server.out").write_text("started\n")
    gcs, raylet = _sleeper(), _sleeper()
    processes = SessionProcesses()
    processes.watch({"gcs_server": gcs, "raylet": raylet}, log_dir=tmp_path)
    asyncio.run(processes.check())
    gcs.send_signal(signal.SIGABRT)
    with pytest.raises(WorkerDied) as died:
        asyncio.run(until_async(processes.check))
    processes.close()
    assert "control store (GCS) died" in died.value.what
    assert f"process {gcs.pid} (gcs_server) was ended by SIGABRT" in died.value.why
    assert "check failed" in died.value.why and "started" not in died.value.why
    assert gcs.wait(60) == -signal.SIGABRT, "the zombie was left to whoever waits for it"
    raylet.kill()
    raylet.wait()


def test_one_that_is_stopped_is_shown_then_named_and_ended_when_ray_is_left(
    tmp_path: Path,
) -> None:
    raylet = _sleeper()
    processes = SessionProcesses()
    processes.silence_s = 0.3
    processes.watch({"raylet": raylet}, log_dir=tmp_path)
    asyncio.run(processes.check())
    assert processes.warnings(0) == []
    raylet.send_signal(signal.SIGSTOP)
    with pytest.raises(WorkerDied, match="raylet has been silent") as died:
        asyncio.run(until_async(processes.check))
    assert f"process {raylet.pid} (raylet) is stopped" in died.value.why
    assert [news.worker for news in processes.warnings(0)] == ["Ray's raylet"]
    assert raylet.poll() is None, "Ray would end this process at once"
    processes.expect_end()
    assert raylet.wait(60) == -signal.SIGKILL
    processes.close()


def test_an_end_that_is_expected_is_none(tmp_path: Path) -> None:
    raylet = _sleeper()
    processes = SessionProcesses()
    processes.watch({"raylet": raylet}, log_dir=tmp_path)
    processes.expect_end()
    raylet.kill()
    raylet.wait()
    for thread in threading.enumerate():
        if thread.name == "ray-session":
            thread.join(BOUND_S)
    asyncio.run(processes.check())
    processes.close()


def test_a_process_that_hangs_for_it_is_ended() -> None:
    program = """
import subprocess, time
from pathlib import Path
from milescli.backends.ray import session_processes
session_processes.END_WITHIN_S = 0.1
processes, raylet = session_processes.SessionProcesses(), subprocess.Popen(["false"])
processes.watch({"raylet": raylet}, log_dir=Path("/nowhere"))
time.sleep(600)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=200).returncode == -9
