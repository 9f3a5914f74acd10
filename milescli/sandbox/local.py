"""Runs the local sandboxes for the driver: one warm supervisor, which is a worker. It starts with
the first run, restarts if it died, and ends with this process."""

from __future__ import annotations

import asyncio
import atexit
import base64
import concurrent.futures
import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from milescli.core.errors import AgentError, MachineError, MilesError, SandboxError
from milescli.sandbox.base import Limits, RunResult
from milescli.sandbox.jail import clear, closed_folders
from milescli.workers.frames import JSON
from milescli.workers.worker import Worker

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0
_SLACK_S = 90.0
"""Seconds, beyond a run's own limits, after which a missing reply is an error."""
_CLOSING_S = 20.0
_BOOT = (
    "import json,sys;sys.path.insert(0,sys.argv[1]);"
    "from milescli.sandbox.supervisor import main;main(json.loads(sys.argv[2]))"
)
_FIX = "miles doctor   # the check `sandbox` tries it"
Reply = dict[str, Any]


class LocalSandbox:
    """Runs programs isolated by bubblewrap or Landlock; `choose` selects which."""

    def __init__(self, kind: str, *, bwrap: str = "", packages: str | None = None) -> None:
        """Set the kind. `packages`: a folder of modules that the code may import besides the
        standard library, e.g. the site-packages of an environment that has numpy."""
        self.kind, self.bwrap = kind, bwrap
        self._config = {"kind": kind, "bwrap": bwrap, "packages": packages or "", **_interpreter()}
        self._supervisor: _Supervisor | None = None
        self._lock = threading.Lock()
        _ALL.add(self)

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits = Limits(),
    ) -> RunResult:
        """Run the code as a Python program; repeat it once if the sandbox fails."""
        message = {
            "code": code,
            "stdin": stdin,
            "files": encode_files(files),
            "limits": asdict(limits),
        }
        message, bound_s = {"op": "run", **message}, limits.wall_s + _SLACK_S
        try:
            return read_result(await (await self._warm()).request_reply(message, bound_s=bound_s))
        except SandboxError:
            return read_result(await (await self._warm()).request_reply(message, bound_s=bound_s))

    async def open(
        self,
        *,
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits = Limits(),
    ) -> LocalSession:
        """Open a session."""
        supervisor = await self._warm()
        message = {"op": "open", "files": encode_files(files), "limits": asdict(limits)}
        number, reply = supervisor.request(message)
        await supervisor.wait(number, reply, bound_s=_SLACK_S)
        return LocalSession(supervisor, number, limits)

    def close(self) -> None:
        """End everything that runs in the sandbox. Idempotent."""
        with self._lock:
            if self._supervisor is not None:
                self._supervisor.close()
            self._supervisor = None

    @property
    def folder(self) -> str | None:
        """Return the folder of the supervisor; with Landlock, each run has its own folder in it."""
        return self._supervisor.folder if self._supervisor else None

    @property
    def pid(self) -> int | None:
        """Return the process id of the supervisor; None if there is none now."""
        return self._supervisor.pid if self._supervisor else None

    async def _warm(self) -> _Supervisor:
        supervisor = self._supervisor
        if supervisor is not None and supervisor.lives:
            return supervisor
        return await asyncio.to_thread(self._ready_supervisor)

    def _ready_supervisor(self) -> _Supervisor:
        with self._lock:
            if self._supervisor is None or not self._supervisor.lives:
                if self._supervisor is not None:
                    self._supervisor.close()
                self._supervisor = _Supervisor(self._config)
            return self._supervisor


class LocalSession:
    """Runs cells in a local sandbox."""

    def __init__(self, supervisor: _Supervisor, number: int, limits: Limits) -> None:
        self._supervisor, self._number, self._limits = supervisor, number, limits
        self._lock, self._is_open = asyncio.Lock(), True

    @property
    def is_open(self) -> bool:
        """Return False after it was closed, or a limit ended it."""
        return self._is_open and self._supervisor.lives

    async def execute(
        self, cell: str, *, wall_s: float = 10.0, output_bytes: int | None = None
    ) -> RunResult:
        """Run a cell like a REPL."""
        message = {
            "op": "cell",
            "session": self._number,
            "code": cell,
            "wall_s": wall_s,
            "output_bytes": output_bytes or self._limits.output_bytes,
        }
        async with self._lock:
            if self._is_open:
                try:
                    reply = await self._supervisor.request_reply(message, bound_s=wall_s + _SLACK_S)
                except BaseException:
                    self._end()  # what the cell has left behind cannot be told
                    raise
                if not reply.get("gone"):
                    self._is_open = reply["lives"]
                    return read_result(reply)
                self._is_open = False
        raise AgentError(
            "the session of the sandbox is closed",
            why=f"it was closed, or reached its own limit ({self._limits.wall_s:g} s in total, "
            f"{self._limits.memory_bytes} bytes)",
            fix="open another session with larger `limits`",
        )

    async def close(self) -> None:
        """End the session with all its processes. Idempotent."""
        if self._is_open and self._supervisor.lives:
            self._is_open = False
            with contextlib.suppress(MilesError):
                message = {"op": "close", "session": self._number}
                await self._supervisor.request_reply(message, bound_s=_CLOSING_S)

    async def __aenter__(self) -> LocalSession:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _end(self) -> None:
        self._is_open = False
        self._supervisor.cancel(self._number)


class _Supervisor(Worker):
    """Represents the process that starts every run."""

    def __init__(self, config: Mapping[str, str]) -> None:
        """Start the process. Raises MachineError if it cannot be started."""
        place = tempfile.gettempdir()
        if os.geteuid() == 0 and closed_folders(place):
            place = "/tmp"
        self.folder = tempfile.mkdtemp(prefix="miles-sandbox-", dir=place)
        super().__init__(
            [
                f"{config['prefix']}/{config['python']}",
                *("-I", "-S", "-c", _BOOT, str(ROOT)),
                json.dumps({**config, "root": str(ROOT), "folder": self.folder}),
            ],
            codec=JSON,  # what is inside came from code of a model
            env={},
            cwd="/",
        )
        self._require_ready()

    async def request_reply(self, message: Reply, *, bound_s: float) -> Reply:
        """Send a message and return the reply. Raises as `wait`."""
        return await self.wait(*self.request(message), bound_s=bound_s)

    async def wait(
        self, number: int, reply: concurrent.futures.Future[Reply], *, bound_s: float
    ) -> Reply:
        """Return the reply to a message that was sent. Raises SandboxError if the supervisor ended
        or did not reply in time, and if the jail failed. In these cases, and if this wait is
        cancelled, the run is ended."""
        try:
            async with asyncio.timeout(bound_s):
                return await asyncio.wrap_future(reply)
        except BaseException as error:
            self.cancel(number)
            if isinstance(error, TimeoutError):
                raise SandboxError(
                    "the sandbox did not respond",
                    why=f"its supervisor (process {self.pid}) had {bound_s:g} s to respond",
                    fix=_FIX,
                ) from None
            raise

    def close(self, grace_s: float = _CLOSING_S, *, cause: str = "it was closed") -> None:
        """End the supervisor, and all runs in it."""
        super().close(grace_s, cause=cause)
        self._has_ended.wait(_CLOSING_S)
        clear(self.folder)

    def _kill(self) -> None:
        """Kill only the supervisor: the wardens of its runs end those first, then themselves."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _ended_error(self) -> Exception:
        return SandboxError(
            "the supervisor of the sandbox ended",
            why="nothing asked it to end, and the code in it has ended too",
            fix="miles doctor   # how much memory is free? then start or resume the run",
        )

    def _call_error(self, error: Any) -> Exception:
        return SandboxError("the sandbox could not be created", why=error, fix=_FIX)

    def _require_ready(self) -> None:
        try:
            closed = self.ready.result(START_TIMEOUT_S)
        except (TimeoutError, SandboxError):
            self.close(0.0)
            raise MachineError(
                "the sandbox did not start",
                why=self.last_printed("") or "its supervisor did not respond",
                fix=_FIX,
            ) from None
        if closed:
            self.close()
            raise MachineError(
                "the sandbox cannot run each program as a separate user",
                why=f"Python or its packages are below {closed}, which other users cannot enter",
                fix=f"chmod o+x {shlex.quote(str(closed))}",
            )


def read_result(reply: Reply) -> RunResult:
    """Return the result that the supervisor's reply describes."""
    fields = ("stdout", "stderr", "exit_code", "ended", "seconds", "is_truncated", "why")
    return RunResult(**{name: reply[name] for name in fields})


def encode_files(files: Mapping[str, str | bytes] | None) -> dict[str, str]:
    """Return the files as they are sent. Raises ValueError if a name leads out of the folder."""
    made = {}
    for name, content in (files or {}).items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
            raise ValueError(f"this is not a valid file name in the sandbox: {name!r}")
        raw = content.encode() if isinstance(content, str) else content
        made[str(path)] = base64.b64encode(raw).decode()
    return made


def _interpreter() -> dict[str, str]:
    """Return the Python below any virtual environment."""
    prefix = os.path.realpath(sys.base_prefix)
    name = f"bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    return {"prefix": prefix, "python": name}


_ALL: weakref.WeakSet[LocalSandbox] = weakref.WeakSet()


def _close_all() -> None:
    for sandbox in list(_ALL):
        sandbox.close()


atexit.register(_close_all)
