"""What stands in for the agent of Ray's dashboard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from milescli.backends.ray import idle_agent
from tests.waiting import until

RAYLET = """\
import subprocess, sys, time
print(subprocess.Popen(sys.argv[1:]).pid, flush=True)
time.sleep(600)
"""


def test_it_says_that_nothing_is_served_and_ends_with_the_raylet(tmp_path: Path) -> None:
    own = ["-I", "-S", idle_agent.__file__, "agent.py", "--node-id=ab12", "--minimal"]
    command = [sys.executable, *own, f"--session-dir={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, "-c", RAYLET, *command], stdout=subprocess.PIPE, text=True
    ) as raylet:
        assert raylet.stdout is not None
        agent = psutil.Process(int(raylet.stdout.readline()))
        ports = [tmp_path / f"{port}_ab12" for port in idle_agent.PORTS]
        until(lambda: all(port.exists() for port in ports))
        assert {port.read_text() for port in ports} == {"-1"}
        assert agent.is_running()
        raylet.kill()
    until(lambda: not agent.is_running())
