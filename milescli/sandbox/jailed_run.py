"""Controls one run in its jail from start to end: reads its output, samples its usage many times a
second, and ends all of it at the first limit. Blocks its thread; called by the supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

from milescli.sandbox.inside import DONE, GO, STARTED, TIMED_OUT
from milescli.sandbox.jail import FOLDER_INSIDE, Jail, remove
from milescli.sandbox.processes import (
    children_of,
    cpu_s_of,
    descendants_of,
    memory_of,
    num_tasks_of,
)
from milescli.sandbox.warden import SIGNAL_BASE

CHECK_EVERY_S = 0.02
"""Seconds between two checks of a run's usage; it may exceed its limits in between."""
MAX_FILES = 4096
_START_S = 60.0
"""Time for the jail and Python to start on a busy machine; the wall time begins after it."""
_DRAIN_S = 5.0
"""Time to read the last output of ended processes."""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class NotStarted(Exception):
    """Reports that the jail itself failed, and the reason."""


@dataclass(slots=True)
class Output:
    """Collects output up to a limit."""

    most: int
    pieces: dict[str, list[bytes]] = field(default_factory=lambda: {"stdout": [], "stderr": []})
    size: int = 0
    is_over: bool = False

    def add(self, stream: str, piece: bytes) -> None:
        """Append a piece; output beyond the limit is discarded."""
        accepted = piece[: self.most - self.size]
        self.pieces[stream].append(accepted)
        self.size += len(accepted)
        self.is_over = self.is_over or len(accepted) < len(piece)

    def as_reply(self) -> dict[str, Any]:
        """Return the output as part of a reply."""
        texts = {name: b"".join(pieces) for name, pieces in self.pieces.items()}
        return {
            **{name: text.decode("utf-8", "replace") for name, text in texts.items()},
            "is_truncated": self.is_over,
        }


class JailedRun:
    """Controls the processes of one jail. Another thread may call `stop`."""

    def __init__(self, jail: Jail, request: dict[str, Any], *, slot: int) -> None:
        """Start the jail. Raises NotStarted, OSError."""
        self.limits = request["limits"]
        self._jail, self._uid = jail, jail.uid_of(slot)
        self._folder = f"{jail.folder}/{slot}" if jail.kind == "landlock" else ""
        self._wake, self._stopped = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), False
        self._has_woken = False
        self._selector = selectors.DefaultSelector()
        self._leash = self.control = self._process_fd = self._first_fd = -1
        self._pump: list[bytes] = []
        self.printed = Output(self.limits["output_bytes"])
        try:
            self._start(request, slot)
            self._await_begin()
            if jail.kind == "bubblewrap":  # with its first process all of the namespace dies
                (pid,) = children_of(self.process.pid)
                self._first_fd = os.pidfd_open(pid)
            os.write(self.control, GO)
        except BaseException:
            self.end()
            raise

    def follow(self, *, deadline: float, is_cell: bool = False) -> dict[str, Any]:
        """Wait until the run ends, reaches a limit or, with `is_cell`, finishes a cell; then return
        a reply with its output. Unless a cell finished, the caller should end it."""
        printed, began = self.printed, time.monotonic()
        ended, why, exit_code = "", "", None
        looked = 0.0
        while not ended:
            now = time.monotonic()
            if now >= deadline:
                ended, why = "timeout", "wall time"
                break
            happened = self._next_event(min(deadline - now, CHECK_EVERY_S))
            if self._stopped:
                ended, why = "killed", "nobody waits for it any more"
            elif printed.is_over:
                ended, why = "output", f"it printed more than {printed.most} bytes"
            elif is_cell and isinstance(happened, bytes):
                ended = "timeout" if happened == TIMED_OUT else "exited"
                why = "wall time of a cell" if happened == TIMED_OUT else ""
                exit_code = 0 if happened == DONE else 1 if not why else None
                self._drain(0.0)
            elif happened == "exited":
                ended, why, exit_code = self._exited()
                self._drain(_DRAIN_S)
            elif now - looked >= CHECK_EVERY_S:
                looked = now
                ended, why = self._exceeded_limit()
        return {
            **printed.as_reply(),
            "ended": ended,
            "why": why,
            "exit_code": exit_code,
            "seconds": time.monotonic() - began,
        }

    def idle(self, *, deadline: float) -> str:
        """Wait between two cells. Return an empty text when there is work, else the reason to end.
        Output that is printed meanwhile belongs to the next cell."""
        self.printed = Output(self.limits["output_bytes"])
        looked = 0.0
        while True:
            now = time.monotonic()
            if self._has_woken:
                self._has_woken = False
                return ""
            if now >= deadline:
                return "wall time of the session"
            if self._next_event(min(deadline - now, 5 * CHECK_EVERY_S)) == "exited":
                return "its process has ended"
            if now - looked >= 5 * CHECK_EVERY_S:
                looked = now
                if why := self._exceeded_limit()[1]:
                    return why

    def send(self, cell: str, *, wall_s: float) -> None:
        """Send a cell to a session. Raises OSError if it is gone."""
        text = cell.encode("utf-8", "surrogatepass")
        bound_ms = max(1, min(int(wall_s * 1000), 2**31))
        head = len(text).to_bytes(8, "little") + bound_ms.to_bytes(4, "little")
        os.set_blocking(self.control, False)
        self._pump = [head + text]
        self._push()

    def stop(self) -> None:
        """Make it end soon; from any thread."""
        self._stopped = True
        self.wake()

    def wake(self) -> None:
        """Make `idle` return; from any thread."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def end(self) -> None:
        """End it at once, with all processes and files. Idempotent."""
        if self._wake == -1:
            return
        process = getattr(self, "process", None)
        if process is not None:
            self._kill(process)
        self._end_first()
        for descriptor in (self._leash, self.control, self._wake, self._process_fd):
            if descriptor != -1:
                os.close(descriptor)
        self._leash = self.control = self._wake = self._process_fd = -1
        self._selector.close()
        if process is not None:
            process.stdout.close()
            process.stderr.close()
        if self._folder:
            remove(self._folder)

    def _end_first(self) -> None:
        """Kill the first process of a namespace, for which bubblewrap does not wait, and wait until
        it has ended, which is after all others."""
        if self._first_fd == -1:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first_fd, signal.SIGKILL)
        ends = select.poll()
        ends.register(self._first_fd, select.POLLIN)
        ends.poll(1000 * _DRAIN_S)
        with contextlib.suppress(ChildProcessError):  # it has fallen to us, who reap it
            os.waitid(os.P_PIDFD, self._first_fd, os.WEXITED | os.WNOHANG)
        os.close(self._first_fd)
        self._first_fd = -1

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if self._leash != -1:
            os.close(self._leash)  # the warden ends what it holds, then itself
            self._leash = -1
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2 * _DRAIN_S)
        process.kill()  # bubblewrap's whole namespace dies with it
        process.wait()
        self._drain(_DRAIN_S)

    def _start(self, request: dict[str, Any], slot: int) -> None:
        if self._folder:
            remove(self._folder)
            os.mkdir(self._folder, 0o700)
            if self._uid is not None:
                os.chown(self._folder, self._uid, self._uid)
        with contextlib.ExitStack() as closing:
            own, theirs = _pair()
            self.control = own
            leash, self._leash = os.pipe() if self._jail.kind == "landlock" else (-1, -1)
            job = _sealed_fd(
                self._jail.job(request, slot=slot, folder=self._folder, control=theirs)
            )
            rules = _sealed_fd(request["filter"])
            stdin = _sealed_fd(request["stdin"].encode("utf-8", "surrogatepass"))
            inherited = [fd for fd in (theirs, leash, job, rules) if fd != -1]
            for descriptor in (*inherited, stdin):
                closing.callback(os.close, descriptor)
            is_bwrap = self._jail.kind == "bubblewrap"
            as_user = {"user": self._uid, "group": self._uid, "extra_groups": []}
            self.process = subprocess.Popen(
                self._jail.command(
                    job, leash=leash, filter_fd=rules, file_bytes=self.limits["file_bytes"]
                ),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=inherited,
                env=self._jail.environment(self._folder),
                cwd="/",
                **(as_user if is_bwrap and self._uid is not None else {}),
            )
        self._process_fd = os.pidfd_open(self.process.pid)
        for source, name in (
            (self.process.stdout, "stdout"),
            (self.process.stderr, "stderr"),
            (self.control, "control"),
            (self._process_fd, "exited"),
            (self._wake, "wake"),
        ):
            self._selector.register(source, selectors.EVENT_READ, name)

    def _await_begin(self) -> None:
        deadline = time.monotonic() + _START_S
        while (happened := self._next_event(CHECK_EVERY_S)) != STARTED:
            if happened == "exited" or self._stopped or time.monotonic() > deadline:
                self._drain(CHECK_EVERY_S)
                stderr = self.printed.as_reply()["stderr"].strip()
                raise NotStarted(stderr[-2000:] or "it said nothing")

    def _next_event(self, timeout_s: float) -> str | bytes:
        """Wait for the next event. Return `exited`, the bytes from the control pipe, or an empty
        text after the timeout. Reads the output meanwhile."""
        result: str | bytes = ""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.data in ("stdout", "stderr"):
                self._take(key)
            elif key.data == "control":
                result = self._control(key) or result
            elif key.data == "wake":
                self._has_woken = self._was_woken() or self._has_woken
            elif key.data == "exited" and not result:
                result = "exited"
        if self._pump:
            self._push()
        return result

    def _take(self, key: selectors.SelectorKey) -> bool:
        piece = os.read(key.fd, 1 << 16)
        if piece:
            self.printed.add(key.data, piece)
        else:
            self._selector.unregister(key.fileobj)
        return bool(piece)

    def _control(self, key: selectors.SelectorKey) -> bytes:
        try:
            piece = os.read(key.fd, 1)
        except ConnectionError:
            piece = b""
        except BlockingIOError:
            return b""
        if not piece:
            self._selector.unregister(key.fileobj)
        return piece

    def _push(self) -> None:
        """Send more of a cell that is larger than the socket's buffer."""
        try:
            sent = os.write(self.control, self._pump[0])
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._pump[0])  # it is gone; its end is seen elsewhere
        self._pump = [rest] if (rest := self._pump[0][sent:]) else []

    def _drain(self, bound_s: float) -> None:
        """Read the output so far; with a time limit, until the last process that could print has
        ended."""
        deadline = time.monotonic() + bound_s
        while True:
            keys = [key for key in self._selector.get_map().values() if key.data[:3] == "std"]
            if not keys:
                return
            ready = [
                key
                for key, _ in self._selector.select(0 if bound_s == 0 else 0.01)
                if key.data[:3] == "std"
            ]
            for key in ready:
                self._take(key)
            if (not ready and bound_s == 0) or time.monotonic() > deadline or self.printed.is_over:
                return

    def _was_woken(self) -> bool:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return False
        return True

    def _exited(self) -> tuple[str, str, int | None]:
        status = self.process.wait()
        if status < 0 or SIGNAL_BASE < status <= SIGNAL_BASE + 64:
            number = -status if status < 0 else status - SIGNAL_BASE
            if number == signal.SIGXCPU:
                return "timeout", "CPU time", None
            names = {item.value: item.name for item in signal.Signals}
            return "killed", names.get(number, f"signal {number}"), None
        return "exited", "", status

    def _exceeded_limit(self) -> tuple[str, str]:
        """Return how the run must end, and why, if it exceeds a limit."""
        limits, pids = self.limits, descendants_of(self.process.pid)
        if memory_of(pids, limit_bytes=limits["memory_bytes"]) > limits["memory_bytes"]:
            return "memory", f"its processes held more than {limits['memory_bytes']} bytes"
        if cpu_s_of(pids) > limits["cpu_s"]:
            return "timeout", "CPU time"
        own = 1 if self._jail.kind == "bubblewrap" else 0  # its first process
        if num_tasks_of(pids) - own > limits["num_processes"]:
            return "killed", f"it had more than {limits['num_processes']} processes"
        size_bytes, num_files = self._files(pids)
        if size_bytes > limits["file_bytes"] or num_files > MAX_FILES:
            return "killed", f"it wrote more than {limits['file_bytes']} bytes or {MAX_FILES} files"
        return "", ""

    def _files(self, pids: list[int]) -> tuple[int, int]:
        """Return bytes and number of the files that it has written."""
        if self._folder:
            return measure(self._folder, most=MAX_FILES)
        for pid in pids[1:2]:
            with contextlib.suppress(OSError):
                seen = os.statvfs(f"/proc/{pid}/root{FOLDER_INSIDE}")
                return 0, seen.f_files - seen.f_ffree  # its bytes are bounded by the file system
        return 0, 0


def measure(folder: str, *, most: int) -> tuple[int, int]:
    """Return (bytes on disk, number of files) of a folder; stop counting after `most` files.
    Follows no link."""
    size_bytes = num_files = 0
    folders = [folder]
    while folders and num_files <= most:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                num_files += 1
                with contextlib.suppress(OSError):
                    size_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                if num_files > most:
                    break
    return size_bytes, num_files


def _pair() -> tuple[int, int]:
    import socket

    own, theirs = socket.socketpair()
    return own.detach(), theirs.detach()


def _sealed_fd(content: bytes) -> int:
    """Return a read-only descriptor of the data, which nobody can change."""
    descriptor = os.memfd_create("job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor
