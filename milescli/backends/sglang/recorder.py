"""Where an engine's scheduler spends its time, by py-spy, which looks at it from outside. Held by
`server.EngineServer`; what goes wrong is told and never raised."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from milescli.core.silence import py_spy

PER_SECOND = 50
"""Looks at the process."""
LONGEST_S = 3600
"""Then it ends by itself, also where nobody is left to stop it."""
STOP_TIMEOUT_S = 20.0


class Recorder:
    """One record that is being taken."""

    def __init__(self, pid: int, file: Path) -> None:
        """Of the process `pid`; begins at once. Raises OSError where it cannot."""
        self.file = file
        tool = py_spy()
        if tool is None:
            raise OSError("py-spy is not installed beside this Python")
        command = [tool, "record", "--pid", str(pid), "--output", str(file), "--format", "raw"]
        command += ["--rate", str(PER_SECOND), "--duration", str(LONGEST_S)]
        command += ["--idle", "--nonblocking", "--nolineno"]
        file.touch(mode=0o600)
        # of a Ray actor the signal is blocked, and a child inherits that
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def stop(self) -> str | None:
        """End it, and have it write what it saw. Returns why there is nothing, where so."""
        self._process.send_signal(signal.SIGINT)
        try:
            _, said = self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return f"py-spy did not end within {STOP_TIMEOUT_S:.0f} s"
        if self._process.returncode == 0 and self.file.stat().st_size:
            return None
        lines = [line for line in said.splitlines() if line.strip()]
        return f"py-spy: {lines[-1] if lines else 'it saw nothing'}"
