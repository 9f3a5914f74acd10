"""A process that imports SGLang before an engine is needed, and from which engines are forked: an
engine on a CPU then starts in a second. Both ends of it: `WarmProcess` for the driver that starts
it, `fork_engine` for the code that needs an engine. `warm_process` is what runs in it.

If there is none, if it has ended, or if it does not fit, engines are started from scratch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from milescli.core.silence import is_stopped_process

FORK_TIMEOUT_S = 120.0
"""Time for the warm process to finish its imports and fork. After that an engine starts from
scratch."""
STOPPED_S = 5.0
"""Seconds for which it may be stopped (SIGSTOP) while a caller waits for an engine."""
LOOK_EVERY_S = 0.5
SHARED_VARIABLE = "MILES_WARM_ENGINES"
"""Variable with the socket of a warm process that several runs share: the trials of a sweep."""
UNKNOWN_CODE = 255
"""Exit code of an engine whose warm process was killed first: only that process could have known
the real one."""


class WarmProcess:
    """Runs a process that has imported what an engine needs. The driver of a run starts it on its
    main thread; it ends with that thread, even by SIGKILL."""

    def __init__(self) -> None:
        """Create it without starting it."""
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: socket.socket | None = None

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the imports, in the environment of the future engines. Returns at once."""
        assert self._process is None, "the warm process was started already"
        self._pipe, its_end = socket.socketpair()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "milescli.backends.sglang.launch.warm_process",
                str(os.getpid()),
            ],
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},
            stdin=its_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        its_end.close()

    def listen(self, folder: Path) -> Path:
        """Listen for requests for engines, in a private folder; return the path of a socket. A
        request before the end of the imports waits for it, and fails at once if the process ends
        instead."""
        assert self._pipe is not None, "listen before start"
        path = folder / "warm"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            path.chmod(0o600)
            if self._process is not None:
                _pid_file(path).write_text(str(self._process.pid))
            listener.listen()
            with contextlib.suppress(OSError):  # it has ended: whoever asks it will see
                socket.send_fds(self._pipe, [b"."], [listener.fileno()])
        return path

    def stop(self) -> None:
        """End it at once; its engines continue. Idempotent."""
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
            self._process = self._pipe = None

    def lend(self, folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
        """Listen for requests of several runs; return the environment variable by which they find
        this process. `environment`: variables that the engines of such a run must have."""
        path = self.listen(folder)
        _wants_file(path).write_text(json.dumps(dict(environment)), encoding="utf-8")
        return {SHARED_VARIABLE: str(path)}


class SharedWarmProcess:
    """Represents a warm process that belongs to another program, such as a sweep, and outlives this
    run."""

    def __init__(self, path: Path) -> None:
        """`path`: of its socket."""
        self._path = path

    def listen(self, folder: Path) -> Path:
        """Return the path of its socket, on which it already listens."""
        return self._path

    def stop(self) -> None:
        """Do nothing: other runs need it."""


def shared_warm_process(environment: Mapping[str, str]) -> SharedWarmProcess | None:
    """Return the warm process that this run may share, if its engines have the same variables; else
    None. `environment`: variables of this run's engines."""
    if not (path := os.environ.get(SHARED_VARIABLE)):
        return None
    try:
        theirs = json.loads(_wants_file(Path(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # its sweep has ended
        return None
    return SharedWarmProcess(Path(path)) if theirs == dict(environment) else None


class NotForked(Exception):
    """Reports why the warm process forked no engine."""


class ForkedEngine:
    """Controls a process that is a child of the warm process, not of this one, with the interface
    of `subprocess.Popen`."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        """Control process `pid`; `connection` delivers its exit code."""
        self.pid = pid
        self.returncode: int | None = None
        self._connection: socket.socket | None = connection
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        """Wait for and return the exit code. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self._look(min(0.1, timeout))) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"engine {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal; does nothing if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)

    def _look(self, timeout_s: float) -> int | None:
        if self.returncode is not None:
            return self.returncode
        ready = _readable((self._connection, self._pidfd), timeout_s)
        if self._connection is not None and self._connection.fileno() in ready:
            reply = _read_line(self._connection)
            if reply is not None:
                return self._ended(reply["code"])
            self._connection.close()
            self._connection = None
        if self._connection is None and (self._pidfd is None or _readable((self._pidfd,), 0.0)):
            return self._ended(UNKNOWN_CODE)
        return None

    def _ended(self, code: int) -> int:
        self.returncode = code
        for handle in (self._connection, self._pidfd):
            if isinstance(handle, socket.socket):
                handle.close()
            elif handle is not None:
                os.close(handle)
        self._connection = self._pidfd = None
        return code


def fork_engine(
    address: Path, *, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> ForkedEngine:
    """Fork an engine with these arguments of `sglang.launch_server`. `environment`: variables
    beyond those that the warm process inherited. Raises NotForked."""
    request = {
        "arguments": list(arguments),
        "environment": dict(environment),
        "log": str(log.absolute()),
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(FORK_TIMEOUT_S)
        connection.connect(str(address))
        connection.sendall(json.dumps(request).encode() + b"\n")
        _wait_for_reply(connection, address)
        reply = _read_line(connection)
    except OSError as error:
        connection.close()
        raise NotForked(f"{type(error).__name__}: {error}") from error
    if reply is None or "pid" not in reply:
        connection.close()
        raise NotForked(reply["refused"] if reply else "it ended before it replied")
    connection.settimeout(None)
    return ForkedEngine(reply["pid"], connection)


def _wait_for_reply(connection: socket.socket, address: Path) -> None:
    """Wait for the warm process's reply. Raises TimeoutError; ConnectionError if the system has
    stopped the warm process, which is then ended: resumed, it would fork an engine that nobody
    needs."""
    deadline, stopped_s = time.monotonic() + FORK_TIMEOUT_S, 0.0
    with contextlib.suppress(FileNotFoundError):
        pid = int(_pid_file(address).read_text(encoding="utf-8"))
        while not _readable((connection,), LOOK_EVERY_S):
            stopped_s = stopped_s + LOOK_EVERY_S if is_stopped_process(pid) else 0.0
            if stopped_s >= STOPPED_S:
                os.kill(pid, signal.SIGKILL)
                raise ConnectionError(f"process {pid} was stopped (SIGSTOP) for {STOPPED_S:.0f} s")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no reply within {FORK_TIMEOUT_S:.0f} s")


def _pid_file(address: Path) -> Path:
    return address.with_suffix(".pid")


def _wants_file(address: Path) -> Path:
    return address.with_suffix(".json")


def _readable(sources: Sequence[socket.socket | int | None], timeout_s: float) -> set[int]:
    """Return the file descriptors that have data, or have ended."""
    poll = select.poll()
    for source in sources:
        if source is not None:
            poll.register(source, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(timeout_s * 1000)}


def _read_line(connection: socket.socket) -> dict[str, Any] | None:
    """Return one line of JSON, and read nothing beyond it; None at the end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := connection.recv(1)):
            return None
        line += byte
    return json.loads(line)
