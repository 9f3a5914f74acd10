"""Starts every run of a driver from a warm process: small, with an empty environment, ended with
its driver. Standard library only; a local sandbox starts one, and calls it as a worker.

Each call has an `op`. `run` (code, stdin, files, limits) -> its result. `open` (files, limits) ->
{opened}; then `cell` (session, code, wall_s, output_bytes), `close` (session). An error means that
the jail itself failed."""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from milescli.sandbox.jail import (
    NUM_SLOTS,
    Jail,
    clear,
    filter_for,
    own_mounts,
    reachable,
    reserve_users,
)
from milescli.sandbox.jailed_run import JailedRun, NotStarted, Output
from milescli.sandbox.seccomp import program
from milescli.workers.frames import JSON
from milescli.workers.guard import adopt_orphans

_MEMORY_BYTES = 2 * 1024**3
_STACK_BYTES = 512 * 1024
_CELL_GRACE_S = 1.0
"""Time for an interrupted cell to end by itself."""
_ENDING_S = 15.0
_ALONE_S = 1.0
"""Seconds between two checks that the driver still lives."""


@dataclass(slots=True)
class _Task:
    """Holds a run or a session, which has a thread of its own."""

    number: int
    request: dict[str, Any]
    inbox: queue.SimpleQueue[tuple[int, dict[str, Any]]] = field(default_factory=queue.SimpleQueue)
    """Cells and close requests, each with its number."""
    jailed_run: JailedRun | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Stop the run, because its caller is gone."""
        self.is_cancelled = True
        if self.jailed_run is not None:
            self.jailed_run.stop()


class Supervisor:
    """Runs tasks in threads, and sends their replies."""

    def __init__(self, jail: Jail) -> None:
        self._jail = jail
        self._lock = threading.Lock()
        self._slots = list(range(NUM_SLOTS))
        self._tasks: dict[int, _Task] = {}
        self._threads: set[threading.Thread] = set()
        self._filter = program()
        self._out = os.fdopen(os.dup(1), "wb")

    def reply(self, number: int, value: Any, *, kind: str = "value") -> None:
        """Send a reply to the driver, ignoring errors: if the driver is gone, this process ends
        soon."""
        with self._lock, contextlib.suppress(OSError):
            self._out.write(JSON.pack((number, kind, value)))
            self._out.flush()

    def take(self, number: int, kind: str, message: dict[str, Any]) -> None:
        """Handle one message from the driver."""
        if kind == "cancel":
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
            return
        if message["op"] in ("run", "open"):
            task = _Task(number, message)
            thread = threading.Thread(target=self._live, args=(task,), daemon=True)
            with self._lock:
                self._tasks[number] = task
                self._threads.add(thread)
            thread.start()
            return
        task = self._tasks.get(message["session"])
        if task is None:
            self.reply(number, {"gone": True})
        else:
            task.inbox.put((number, message))
            if task.jailed_run is not None:
                task.jailed_run.wake()

    def end(self) -> None:
        """Cancel everything that runs, and wait for its threads."""
        for task in list(self._tasks.values()):
            task.cancel()
        deadline = time.monotonic() + _ENDING_S
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _live(self, task: _Task) -> None:
        try:
            slot = self._slots.pop()
        except IndexError:
            why = f"{NUM_SLOTS} runs and sessions are open, which is the most"
            self._finish(task, why, kind="error")
            return
        kind = "value"
        try:
            result = self._run(task, slot)
        except (NotStarted, OSError, ValueError) as error:
            kind, result = "error", f"{type(error).__name__}: {error}"
        finally:
            self._slots.append(slot)
        self._finish(task, result, kind=kind)

    def _finish(self, task: _Task, result: Any, *, kind: str) -> None:
        with self._lock:
            self._tasks.pop(task.number, None)
            self._threads.discard(threading.current_thread())
        self.reply(task.number, result, kind=kind)
        while not task.inbox.empty():
            self.reply(task.inbox.get()[0], {"gone": True})

    def _run(self, task: _Task, slot: int) -> dict[str, Any]:
        request = task.request
        request["files"] = {name: base64.b64decode(text) for name, text in request["files"].items()}
        request["filter"] = self._filter
        is_session = request["op"] == "open"
        request |= {"code": None, "stdin": ""} if is_session else {}
        task.jailed_run = contained = JailedRun(self._jail, request, slot=slot)
        try:
            if task.is_cancelled:
                contained.stop()
            deadline = time.monotonic() + request["limits"]["wall_s"]
            if is_session:
                return self._cells(task, contained, deadline=deadline)
            return contained.follow(deadline=deadline)
        finally:
            contained.end()

    def _cells(self, task: _Task, jailed_run: JailedRun, *, deadline: float) -> dict[str, Any]:
        """Reply `opened`, then run cells until the session is closed or its time is up."""
        self.reply(task.number, {"opened": True})
        while True:
            why = jailed_run.idle(deadline=deadline) if task.inbox.empty() else ""
            if why or task.is_cancelled:
                return {"closed": why or "it was closed"}
            if task.inbox.empty():
                continue
            number, message = task.inbox.get()
            if message["op"] == "close":
                task.inbox.put((number, message))  # answered when all has ended
                return {"closed": "it was closed"}
            jailed_run.send(message["code"], wall_s=message["wall_s"])
            until = min(deadline, time.monotonic() + message["wall_s"] + _CELL_GRACE_S)
            jailed_run.printed = Output(message["output_bytes"])
            result = jailed_run.follow(deadline=until, is_cell=True)
            lives = result["why"] == "wall time of a cell" or (
                result["ended"] == "exited" and jailed_run.process.poll() is None
            )
            self.reply(number, {**result, "lives": lives})
            if not lives:
                return {"closed": result["why"] or "its process has ended"}


def main(config: dict[str, Any]) -> None:
    """Serve requests until standard input ends, or the driver is gone."""
    adopt_orphans()  # no zombie is left to an init that may not reap
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 65536
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(most, 65536)), hard))
    data_hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, data_hard))
    threading.stack_size(_STACK_BYTES)
    os.umask(0o077)
    folder = config.pop("folder")
    try:
        _serve(_jail(config, folder=folder))
    except PermissionError as error:
        sys.stdout.buffer.write(JSON.pack((-1, "ready", str(error))))
        sys.stdout.buffer.flush()
    finally:
        clear(folder)
        os._exit(0)


def _jail(config: dict[str, Any], *, folder: str) -> Jail:
    """Return the jail. Raises PermissionError with the folders that it cannot reach."""
    os.chmod(folder, 0o711)
    has_mounts = os.geteuid() == 0 and own_mounts()

    def seen(path: str, name: str) -> str:
        return reachable(path, folder=folder, name=name, may_mount=has_mounts)

    packages = config.pop("packages")
    return Jail(
        **config | {"prefix": seen(config["prefix"], "python")},
        packages=seen(packages, "packages") if packages else "",
        folder=folder,
        first_uid=reserve_users() if os.geteuid() == 0 else -1,
    )


def _serve(jail: Jail) -> None:
    supervisor = Supervisor(jail)
    if jail.kind == "landlock":
        filter_for(jail.uid_of(0))  # fails at once where it cannot be made
    driver = os.getppid()

    def leave(*_: object) -> None:
        supervisor.end()
        clear(jail.folder)
        os._exit(0)

    def look() -> None:
        while os.getppid() == driver:
            time.sleep(_ALONE_S)
        leave()

    signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=look, daemon=True).start()
    supervisor.reply(-1, None, kind="ready")
    while (line := JSON.read(sys.stdin.buffer)) is not None:
        supervisor.take(*JSON.unpack(line))
    supervisor.end()
