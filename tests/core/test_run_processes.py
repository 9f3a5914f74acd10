"""What the system says of a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from milescli.core.run_processes import CpuClock, cpu_seconds


def test_a_process_that_computes_is_busy_and_one_that_is_stopped_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            clock, until = CpuClock(), time.monotonic() + 60
            assert not clock.is_busy(cpu_seconds(child.pid))
            while not clock.is_busy(cpu_seconds(child.pid)):
                assert time.monotonic() < until
            child.send_signal(signal.SIGSTOP)
            while clock.is_busy(cpu_seconds(child.pid)):
                time.sleep(0.1)
                assert time.monotonic() < until
        finally:
            child.kill()
    assert cpu_seconds(child.pid) == 0.0
