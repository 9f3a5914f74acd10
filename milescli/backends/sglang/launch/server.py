"""Starts and stops real SGLang engines, as child processes. Independent of Ray and of the fleet: a
Ray actor, a test or a benchmark owns an EngineServer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path

import psutil

from milescli.backends.sglang.launch.command import (
    engine_arguments,
    engine_command,
    engine_environment,
    own_environment,
)
from milescli.backends.sglang.launch.key import bearer
from milescli.backends.sglang.launch.process import (
    Child,
    ManagedProcess,
    end_group_of_run,
    status,
)
from milescli.backends.sglang.launch.spec import EngineSpec, check_servable, check_speculates
from milescli.backends.sglang.launch.speculation import require_compiler
from milescli.backends.sglang.launch.warm import NotForked, fork_engine
from milescli.core.run_processes import TOKEN_VARIABLE
from milescli.core.silence import dump_stacks, is_stopped_process, py_spy

PART_PREFIX = "sglang::"
"""Prefix of SGLang's names of its schedulers and its detokenizer."""
LOG_EVERY_S = 1.0
"""Seconds between two looks at the log while the engine starts."""
_KILLED_PART = re.compile(r"exit code:? -\d")
"""Line of the log if a signal killed one of them."""
_FAILED_PART = re.compile("sigquit", re.IGNORECASE)
"""Line of the log if one of them had an error of its own."""

QUEUES = Path("/dev/shm")
"""Folder in which an engine of several ranks has a queue between them, named after the first
rank."""


class EngineServer(ManagedProcess):
    """Runs one SGLang engine: HTTP server, scheduler ranks and detokenizer in one process group."""

    stop_signal = signal.SIGINT
    """On SIGTERM SGLang waits 5 s for requests to end, even if there is none."""

    def __init__(self, spec: EngineSpec) -> None:
        """Prepare the process without starting it. Raises RecipeError or MachineError if the model
        cannot be served here."""
        check_servable(spec)
        check_speculates(spec)
        if spec.speculation is not None and spec.speculation.kind == "ngram":
            require_compiler(spec.name)
        assert spec.api_key is not None or ip_address(spec.host).is_loopback, (
            f"{spec.name} on {spec.host} without a key"
        )
        self.spec = spec
        if spec.node_rank > 0:
            # no requests to drain; on INT SGLang ends its ranks there and then spins
            self.stop_signal = signal.SIGTERM
        self._parts = dict[str, psutil.Process]()
        """Schedulers and detokenizer by name, once the engine is ready."""
        self._log_read_at = 0.0
        self._recorder: Recorder | None = None
        super().__init__(
            name=spec.name,
            command=engine_command(spec),
            env=engine_environment(spec),
            log_path=spec.log_path,
            url=spec.url,
        )

    def start(self) -> None:
        """Start the process, after removing what its predecessor left."""
        if self.spec.ends_group:
            end_group_of_run(self.spec.ends_group)
        super().start()

    def _spawn(self, env: dict[str, str]) -> Child:
        """Fork the engine from the warm process, if there is one that fits; else start it."""
        if self.spec.warm is None:
            return super()._spawn(env)
        wanted = own_environment(self.spec) | {"TMPDIR": env["TMPDIR"]}
        if TOKEN_VARIABLE in os.environ:
            wanted[TOKEN_VARIABLE] = os.environ[TOKEN_VARIABLE]
        try:
            return fork_engine(
                self.spec.warm,
                arguments=engine_arguments(self.spec),
                environment=wanted,
                log=self.log_path,
            )
        except NotForked as error:
            with self.log_path.open("a", encoding="utf-8") as log:
                log.write(
                    f"miles: the warm process returned no engine ({error}): starting a new one\n"
                )
            return super()._spawn(env)

    def wait_ready(self, timeout_s: float, *, sleep: Callable[[float], None] = time.sleep) -> float:
        """Wait as ManagedProcess does, and check that an engine with a key refuses other callers.
        Freezes the engine's objects for Python's garbage collector: searching them takes 0.4 s, in
        the middle of a rollout and in every cache flush on a CPU."""
        seconds = super().wait_ready(timeout_s, sleep=sleep)
        if self.spec.node_rank == 0:
            if self.spec.api_key is not None:
                code = status(f"{self.url}/model_info", timeout_s=timeout_s)
                assert code == HTTPStatus.UNAUTHORIZED, (
                    f"{self.name} answers {code} to a request without its key"
                )
            code = status(
                f"{self.url}/freeze_gc", timeout_s=timeout_s, headers=bearer(self.spec.api_key)
            )
            assert code == HTTPStatus.OK, f"{self.name} answers {code} to /freeze_gc"
        assert self.pid is not None, f"{self.name} is ready and was not started"
        self._parts = {
            part.name(): part
            for part in psutil.Process(self.pid).children(recursive=True)
            if part.name().startswith(PART_PREFIX)
        }
        return seconds

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop it, and remove the queue between its ranks, which SGLang leaves in /dev/shm."""
        super().stop(timeout_s)
        for part in self._parts.values():
            for queue in QUEUES.glob(f"sgl_shm_mq_{part.pid}_*"):
                queue.unlink(missing_ok=True)

    def _ended_in_start(self) -> str | None:
        """Return how the engine ended while it started. Its log reports if a process of it was
        killed, after which it may continue for a minute."""
        if (how := self.ended()) is not None or time.monotonic() < self._log_read_at + LOG_EVERY_S:
            return how
        self._log_read_at = time.monotonic()
        killed = _KILLED_PART.search(self.last_words())
        return f"a process of it has {killed[0]}" if killed else None

    def _was_killed(self) -> bool:
        """Return True if any of its processes was killed. SGLang kills them all if one reports a
        failure."""
        words = self.last_words()
        was_killed = super()._was_killed() and _FAILED_PART.search(words) is None
        return was_killed or _KILLED_PART.search(words) is not None

    def ended(self) -> str | None:
        """Describe how it, or a process that it needs, ended; None while all of it runs. SGLang
        itself may not notice: without its detokenizer requests wait forever."""
        if (how := super().ended()) is not None:
            return how
        gone = [name for name, part in self._parts.items() if not _lives(part)]
        return f"its process {gone[0]} is gone" if gone else None

    def _stopped(self) -> str | None:
        for name, part in self._parts.items():
            if is_stopped_process(part.pid):
                return f"its process {name} ({part.pid}) is stopped (SIGSTOP)"
        return super()._stopped()

    def _computing_pids(self) -> list[int]:
        return [part.pid for name, part in sorted(self._parts.items()) if "sched" in name]

    def start_record(self, file: str) -> str | None:
        """Start sampling the stack of its first scheduler many times a second. Returns the reason
        if that is impossible."""
        self.stop_record()
        if not (schedulers := self._computing_pids()):
            return "it has no scheduler on this node"
        try:
            self._recorder = Recorder(schedulers[0], Path(file))
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def stop_record(self) -> dict[str, str]:
        """End the record; returns its `file`, or an `error`."""
        if (recorder := self._recorder) is None:
            return {"error": "the engine was replaced, or could not be looked at"}
        self._recorder = None
        error = recorder.stop()
        return {"file": recorder.file.name} if error is None else {"error": error}

    def dump_stacks(self) -> str | None:
        """Write the stacks of all its processes beside its log; returns the path, or None if they
        cannot be read."""
        assert self.pid is not None, f"{self.name} was not started"
        pids = {self.name: self.pid} | {name: part.pid for name, part in self._parts.items()}
        return dump_stacks(pids, self.log_path.with_suffix(".stacks.txt"))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


PER_SECOND = 50
"""Samples per second."""
LONGEST_S = 3600
"""Seconds after which the recorder ends by itself, even if nobody is left to stop it."""
STOP_TIMEOUT_S = 20.0


class Recorder:
    """Records with py-spy, from outside, where an engine's scheduler spends its time. Reports
    errors, and never raises after its start."""

    def __init__(self, pid: int, file: Path) -> None:
        """Start recording the process `pid`. Raises OSError if that fails."""
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
        """End the recording and write it. Return the reason if there is no result."""
        self._process.send_signal(signal.SIGINT)
        try:
            _, stderr = self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return f"py-spy did not end within {STOP_TIMEOUT_S:.0f} s"
        if self._process.returncode == 0 and self.file.stat().st_size:
            return None
        lines = [line for line in stderr.splitlines() if line.strip()]
        return f"py-spy: {lines[-1] if lines else 'it saw nothing'}"
