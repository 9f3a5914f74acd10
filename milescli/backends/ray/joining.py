"""Joins an existing Ray cluster, or starts one here. Used by `cluster` and `each_node`; to leave,
call `ray.shutdown`."""

from __future__ import annotations

import functools
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from milescli.backends.ray import idle_agent
from milescli.core.driver_pipe import exit_if_parent_reports, report_to_parent
from milescli.core.errors import MachineError
from milescli.core.files import last_log_lines
from milescli.platform.cpu import threads_left

NAMESPACE = "miles"
START_TIMEOUT_S = 120.0
"""Time limit for the start of Ray's server and for that of its node. Ray's own limit is 30 s for
each, which a busy computer may exceed."""
MIN_THREADS = 300
"""Threads that this machine must allow: a run of one rank and two engines has 390, and Ray alone
150; Ray aborts or hangs if it cannot start one."""
LOOPBACK = "127.0.0.1"
_LOGS = ("gcs_server.err", "gcs_server.out", "raylet.err", "raylet.out")
STOP_WAIT_S = 1.0
"""Seconds that a stopped run waits for Ray to connect."""
REACH_TIMEOUT_S = 10.0
"""Time limit for the first connection to a cluster's address: Ray itself waits for minutes if
nothing answers."""


def join(address: str) -> None:
    """Become a driver of the cluster at `address` (HOST:PORT, or auto for the one on this machine).
    Must run in the main thread.

    Raises MachineError if nothing answers there, the token is wrong, this machine is not part of
    the cluster, or the versions of Ray or Python differ.
    """
    if address != "auto":
        _require_listener(address)
    _connect(address, settings={})


def start_here(settings: dict[str, Any], *, timeout_s: float) -> None:
    """Start a cluster of this machine alone, for this process, whatever RAY_ADDRESS says; child
    processes do not see that variable either. Raises MachineError if it cannot start. If Ray hangs
    for longer than `timeout_s`, this process ends with that error."""
    require_threads()
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", f"{START_TIMEOUT_S:.0f}")
    # processes that it begins ahead are for actors of ours, which come when imports are done; by
    # itself it ends them after a second
    idle_ms = f"{1000 * START_TIMEOUT_S:.0f}"
    os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", idle_ms)
    session = Path(settings["_temp_dir"])
    with (
        _without_monitors(),
        with_longer_node_wait(),
        stderr_in_log() as log,
        bounded(timeout_s, session, log=log),
    ):
        _connect("local", settings=settings, log=log)


def require_threads() -> None:
    """Raise MachineError if Ray would hang: if there is no loopback interface, or this machine
    allows too few threads."""
    try:
        with socket.create_server((LOOPBACK, 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=REACH_TIMEOUT_S).close()
    except OSError as error:
        raise MachineError(
            "Ray cannot start: this machine has no working loopback interface",
            why=f"a connection to {LOOPBACK} failed: {error}",
            fix=["ip link set lo up   # as root", "miles doctor   # its check `ports`"],
        ) from None
    left, limit = min(threads_left(), default=(MIN_THREADS, 0))
    if left < MIN_THREADS:
        raise MachineError(
            "Ray cannot start: this machine allows too few threads",
            why=f"{left} of {limit} are left, and a small run needs {MIN_THREADS} or more",
            fix=[
                "docker run --pids-limit=-1 ...   # in Docker",
                "miles doctor   # its check `threads` names the limit",
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StderrLog:
    """Describes the file that receives this process's standard error."""

    path: Path
    terminal: int
    """File descriptor of the original standard error."""

    def quote(self) -> str:
        """Return the file's last lines as part of an error; empty if there are none."""
        lines = last_log_lines(self.path, 3) if self.path.stat().st_size else ""
        return f"; its last messages:\n{lines}" if lines else ""


@contextmanager
def stderr_in_log() -> Iterator[StderrLog]:
    """Redirect standard error to a file within the context: Ray's C++ prints to it when it fails to
    start, which is not for users; the error quotes the end of it. If Ray kills this process, its
    parent quotes and removes the file."""
    descriptor, name = tempfile.mkstemp(prefix="miles-ray-", suffix=".log", dir="/tmp")
    log = StderrLog(path=Path(name), terminal=os.dup(2))
    report_to_parent(ray_log=log.path)
    sys.stderr.flush()
    os.dup2(descriptor, 2)
    os.close(descriptor)
    try:
        yield log
    finally:
        os.dup2(log.terminal, 2)
        os.close(log.terminal)
        report_to_parent(ray_log="")
        log.path.unlink(missing_ok=True)


@contextmanager
def bounded(timeout_s: float, folder: Path, *, log: StderrLog) -> Iterator[None]:
    """End this process if Ray does not start within `timeout_s`: its C++ code waits without a limit
    and ignores exceptions. `folder`: of Ray's session, whose logs the error quotes, with `log`."""

    def give_up() -> None:
        error = MachineError(
            "Ray did not start",
            why=f"it had {timeout_s:g} s{_ray_log_excerpt(folder)}{log.quote()}",
            fix=[
                "miles doctor   # its checks `ports`, `threads`, `shm` and `ray`",
                f"--set machine.start_timeout_s={2 * timeout_s:g}   # if this machine is slow",
            ],
        )
        report_to_parent(cause=error.as_dict())
        exit_if_parent_reports()
        log.path.unlink(missing_ok=True)
        os.write(log.terminal, f"error: {error}\n".encode())
        os._exit(error.exit_code)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ray_log_excerpt(folder: Path) -> str:
    """Return the last lines of the logs of Ray's control store and raylet, each after its file."""
    logs = [folder / "session_latest" / "logs" / name for name in _LOGS]
    found = [log for log in logs if log.exists() and log.stat().st_size]
    return "".join(f"; last lines of {log.name}:\n{last_log_lines(log, 3)}" for log in found)


@contextmanager
def _without_monitors() -> Iterator[None]:
    """Start Ray without the autoscaler, because a cluster of one computer cannot grow; without the
    log monitor, because our actors have their own log files; without the dashboard, for whose
    server Ray waits even if no page is used; and with `idle_agent` as its agent. Together they cost
    three to four seconds of a core at every start, and one at the end. `ray start` has options for
    the first two, `ray.init` has none."""
    from ray._private import node, parameter, ray_constants, services, utils

    fewer = functools.partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)
    unwanted = ImportError("not wanted")
    builder = "_build_python_executable_command_memory_profileable"
    build = getattr(services, builder, None)

    def command(component: str, *args: Any, **kwargs: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-I", "-S", idle_agent.__file__]
        return build(component, *args, **kwargs)

    with (
        _temporarily_replaced(parameter, "RayParams", fewer),
        _temporarily_replaced(node.Node, "start_api_server", lambda *_, **__: None),
        _temporarily_replaced(utils, "get_dashboard_dependency_error", lambda: unwanted),
        _temporarily_replaced(services, builder, command),
    ):
        yield


@contextmanager
def with_longer_node_wait() -> Iterator[None]:
    """Make Ray wait for its node up to START_TIMEOUT_S within the context, because no setting
    changes Ray's own limit. Raises ChildProcessError if the node is dead: Ray would retry after any
    RuntimeError."""
    from ray._private import services

    look = services.get_node

    def wait(gcs_address: str, node_id: str) -> Any:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return look(gcs_address, node_id)
            except RuntimeError as error:  # it has not told of itself yet
                if not is_raylet_alive():
                    raise ChildProcessError("its raylet ended during start-up") from error
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    with _temporarily_replaced(services, "get_node", wait):
        yield


def is_raylet_alive() -> bool:
    """Return True if a child of this process is a raylet that has not ended."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


@contextmanager
def _temporarily_replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace Ray's `owner.name` by `value` within the context, if this version has it."""
    if not hasattr(owner, name):
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _connect(address: str, *, settings: dict[str, Any], log: StderrLog | None = None) -> None:
    import ray
    from ray._private import utils

    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "configure_logging": False,
        "logging_level": logging.ERROR,
    }
    try:
        # Ray's own handler of SIGTERM would end us in the middle of it
        with (
            deferring_signals(),
            _temporarily_replaced(utils, "set_sigterm_handler", lambda _: None),
        ):
            ray.init(address=address, namespace=NAMESPACE, **quiet, **settings)
        # What Ray thinks of dead workers goes to standard output, which is for results; our errors
        # name the cause. There is no public switch.
        ray._private.worker._worker_logs_enabled = False
    except Exception as error:  # Ray raises many kinds here
        raise _explained(address, error, quote=log.quote() if log else "") from error


@contextmanager
def deferring_signals() -> Iterator[None]:
    """Defer Ctrl-C, SIGTERM and SIGHUP to the end of the block. If the block lasts STOP_WAIT_S
    longer after a signal, the driver exits; a second signal acts at once. If Ray is interrupted
    while it connects, it hangs for seconds, then kills this process with SIGSEGV. Processes that
    the block starts ignore SIGHUP, and outlive a terminal that closes. Does not cover the second in
    which Ray's C++ has its own SIGTERM handler, which prints a stack and exits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(handler := signal.getsignal(number))
    }
    came: list[tuple[int, FrameType | None]] = []
    leaving = threading.Timer(STOP_WAIT_S, exit_if_parent_reports)
    leaving.daemon = True

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            handlers[number](number, frame)
        else:
            leaving.start()
        came.append((number, frame))

    for number in handlers:
        signal.signal(number, note)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        leaving.cancel()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        number, frame = came[0]
        handlers[number](number, frame)


def _explained(address: str, error: Exception, *, quote: str) -> MachineError:
    why = f"{type(error).__name__}: {error}{quote}"
    if address == "local":
        return MachineError("Ray did not start", why=why, fix="miles doctor   # its check `ray`")
    if "Version mismatch" in str(error):
        return MachineError(
            f"the Ray cluster at {address} runs a different version than this machine",
            why=" ".join(str(error).split()),
            fix=f"ray stop && ray start --address={address}   # with the same Python environment "
            "on every machine",
        )
    if isinstance(error, ConnectionError):
        why += (
            "; somebody listens there: it may be no Ray, or want another token than this "
            "process has"
        )
    return MachineError(
        f"this machine cannot join the Ray cluster at {address}",
        why=why,
        fix=[
            f"ray start --address={address}   # adds this machine to the cluster",
            "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=FILE   # if the cluster was started "
            "with a token",
            f"ray status --address={address}",
        ],
    )


def _require_listener(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT_S).close()
    except OSError as error:
        raise MachineError(
            f"no Ray cluster answers at {address}",
            why=f"{type(error).__name__}: {error} (waited at most {REACH_TIMEOUT_S:.0f} s)",
            fix=[
                f"ray start --head --node-ip-address={host} --port={port}   # on that machine",
                "--address HOST:PORT   # where the cluster runs",
            ],
        ) from None
