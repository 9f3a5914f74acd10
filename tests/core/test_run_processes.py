"""What the system says of a process."""

from __future__ import annotations

import signal
import subprocess
import sys

from milescli.core.run_processes import CpuClock, cpu_seconds
from tests.waiting import until


def test_a_process_that_computes_is_busy_and_one_that_is_stopped_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            clock = CpuClock()
            assert not clock.is_busy(cpu_seconds(child.pid))
            until(lambda: clock.is_busy(cpu_seconds(child.pid)))
            child.send_signal(signal.SIGSTOP)
            until(lambda: not clock.is_busy(cpu_seconds(child.pid)))
        finally:
            child.kill()
    assert cpu_seconds(child.pid) == 0.0
