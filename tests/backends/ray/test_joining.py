"""Ctrl-C and SIGTERM while Ray connects, and how long its node is waited for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from milescli.backends.ray import joining
from milescli.backends.ray.joining import deferring_signals, require_threads, with_longer_node_wait
from milescli.core.errors import ExitCode, MachineError


@pytest.fixture(autouse=True)
def _interruptible():
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_effect_at_the_end(number: signal.Signals) -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), deferring_signals():
        os.kill(os.getpid(), number)
        reached = True
    assert reached and signal.getsignal(number) is signal.default_int_handler


def test_a_second_one_takes_effect_at_once() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), deferring_signals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        reached = True
    assert not reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_fails_meanwhile_is_raised_and_whoever_ignores_interrupts_goes_on_to() -> None:
    with pytest.raises(ConnectionError), deferring_signals():
        os.kill(os.getpid(), signal.SIGINT)
        raise ConnectionError
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferring_signals():
        os.kill(os.getpid(), signal.SIGINT)


def test_a_node_that_starts_slowly_is_waited_for_and_a_dead_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private import services

    looks = list[str]()

    def look(gcs_address: str, node_id: str) -> dict[str, str]:
        looks.append(node_id)
        if len(looks) < 4:
            raise RuntimeError("it has not told of itself yet")
        return {"node": node_id}

    monkeypatch.setattr(services, "get_node", look)
    with with_longer_node_wait():
        monkeypatch.setattr(joining, "is_raylet_alive", lambda: False)
        with pytest.raises(ChildProcessError, match="raylet ended"):
            services.get_node("127.0.0.1:1", "first")
        monkeypatch.setattr(joining, "is_raylet_alive", lambda: True)
        assert services.get_node("127.0.0.1:1", "second") == {"node": "second"}
    assert looks == ["first", "second", "second", "second"]
    assert services.get_node is look


_LIVES = """
import subprocess, sys
from milescli.backends.ray.joining import is_raylet_alive
told = [is_raylet_alive()]
child = subprocess.Popen([sys.argv[1], "60"])
told.append(is_raylet_alive())
child.kill()
while open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
    pass
print(*told, is_raylet_alive())
"""


def test_a_raylet_lives_until_it_ends_also_where_nobody_waits_for_it(tmp_path: Path) -> None:
    """In a process without one; this one may have a cluster."""
    raylet = shutil.copy(shutil.which("sleep") or "", tmp_path / "raylet")
    command = [sys.executable, "-c", _LIVES, str(raylet)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert told.stdout.split() == ["False", "True", "False"], told.stderr


def test_a_machine_without_loopback_is_refused_before_ray_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_threads()
    monkeypatch.setattr(joining, "LOOPBACK", "192.0.2.1")  # kept for documents: nobody has it
    with pytest.raises(MachineError, match="no working loopback interface"):
        require_threads()


def test_a_machine_that_allows_too_few_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "threads_left", lambda: [(5000, 9000), (20, 512)])
    with pytest.raises(MachineError, match="too few threads") as raised:
        require_threads()
    assert "20 of 512 are left" in raised.value.why


_WAITS = """
import os, sys, time
from pathlib import Path
from milescli.backends.ray.joining import bounded, stderr_in_log
folder = Path(sys.argv[1])
with stderr_in_log() as log, bounded(3600, folder, log=log):
    pass
with stderr_in_log() as log, bounded(1, folder, log=log):
    os.write(2, b"[W 1 1] gcs_client.cc:210: no cluster ID")
    time.sleep(3600)
"""


def test_a_ray_that_does_not_start_ends_this_process_with_its_last_words(tmp_path: Path) -> None:
    logs = tmp_path / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "gcs_server.out").write_text("the port is taken\n")
    command = [sys.executable, "-c", _WAITS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == ExitCode.NOT_READY
    assert ended.stderr.startswith("error: Ray did not start")
    assert "the port is taken" in ended.stderr and "gcs_client.cc:210" in ended.stderr
