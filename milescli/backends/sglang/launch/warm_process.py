"""The warm process: imports once what an engine on a CPU imports, then forks engines on request.
Run as `python -m` by `warm`, in the environment of an engine; it opens no device, starts no thread,
and ends with the process that started it.

Standard input is a socket over which it receives the socket to listen on; when it closes, this
process ends. Each connection is for one engine: a line of JSON requests it, one answers with its
pid or the reason why there is none, and a last one says how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

from milescli.backends.sglang.launch.key import KEY_VARIABLE, change_key
from milescli.core.imports import without_gc
from milescli.core.run_processes import TOKEN_VARIABLE
from milescli.platform.no_compiler import disable_compiler
from milescli.workers.guard import end_with_parent

BEFORE_PLUGINS = (
    "sglang.srt.arg_groups.overrides",
    "sglang.srt.plugins",
    "sglang.srt.server_args",
)
"""What `sglang.launch_server` imports before it loads its plug-ins, of which ours is one."""
AFTER_PLUGINS = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)
"""What it imports afterwards, in its own process or in those that it forks."""
ENGINE_MODULE = "sglang.launch_server"
PER_ENGINE = ("TMPDIR", KEY_VARIABLE, TOKEN_VARIABLE)
"""Variables that differ between engines, and that are not read while these modules are imported."""
LARGEST_REQUEST = 1 << 20
REAP_TIMEOUT_S = 2.0
"""Longest that an engine waits at its end for its children, which were sent SIGKILL."""


def main() -> None:
    """Import, listen, fork. Returns only in engines, with their arguments in `sys.argv`."""
    end_with_parent(int(sys.argv[1]))
    environment = dict(os.environ)
    import_all()
    driver = socket.socket(fileno=os.dup(0))
    _, listeners, _, _ = socket.recv_fds(driver, 1, 1)
    if not listeners:
        os._exit(0)
    _Server(socket.socket(fileno=listeners[0]), driver, environment).serve()


def import_all() -> None:
    """Import everything in the order of an engine: our plug-in must precede SGLang's HTTP server.
    Freezes the imported objects, so that the garbage collector neither searches nor copies them in
    any engine."""
    with without_gc():
        disable_compiler()  # engines on a CPU are told to (TORCH_COMPILE_DISABLE)
        for name in BEFORE_PLUGINS:
            importlib.import_module(name)
        sys.modules["sglang.srt.plugins"].load_plugins()
        for name in AFTER_PLUGINS:
            importlib.import_module(name)


class _Server:
    """Listens for requests, and holds the connections of running engines."""

    def __init__(
        self, listener: socket.socket, driver: socket.socket, environment: dict[str, str]
    ) -> None:
        self.environment = environment
        self.listener, self.driver = listener, driver
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.selector.register(driver, selectors.EVENT_READ, self._end)
        self.forked = False

    def serve(self) -> None:
        """Serve until the end of this process; returns in every forked engine."""
        while not self.forked:
            for key, _ in self.selector.select():
                key.data()
                if self.forked:
                    return

    def _end(self) -> None:
        os._exit(0)

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        received = bytearray()

        def read() -> None:
            more = connection.recv(65536)
            received.extend(more)
            if more and not received.endswith(b"\n") and len(received) < LARGEST_REQUEST:
                return
            self.selector.unregister(connection)
            if more:
                self._answer(connection, bytes(received))
            else:  # whoever asked gave up
                connection.close()

        self.selector.register(connection, selectors.EVENT_READ, read)

    def _answer(self, connection: socket.socket, received: bytes) -> None:
        request = json.loads(received)
        if refusal := self._refusal(request["environment"]):
            _send(connection, {"refused": refusal})
            connection.close()
            return
        became, becoming = os.pipe()
        pid = os.fork()
        if pid == 0:
            self.forked = True
            self._reset_in_child(connection)
            os.close(became)
            apply_request(request)
            os.close(becoming)
            return
        os.close(becoming)
        # its end: the engine leads a group of its own, by which it can be stopped, or has ended
        os.read(became, 1)
        os.close(became)
        ended = os.pidfd_open(pid)

        def reap() -> None:
            self.selector.unregister(ended)
            os.close(ended)
            _send(connection, {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})
            connection.close()

        self.selector.register(ended, selectors.EVENT_READ, reap)
        if not _send(connection, {"pid": pid}):  # nobody would ever stop it
            os.kill(pid, signal.SIGKILL)

    def _refusal(self, wanted: dict[str, str]) -> str | None:
        """Return why no engine with these variables can be forked from this process; None if it
        can."""
        unlike = [
            name
            for name, value in wanted.items()
            if name not in PER_ENGINE and self.environment.get(name) != value
        ]
        if unlike:
            return f"it was started with other values of {', '.join(sorted(unlike))}"
        token = wanted.get(TOKEN_VARIABLE, "")
        if token and len(self.environment.get(TOKEN_VARIABLE, "")) != len(token):
            return f"it was started without a {TOKEN_VARIABLE} that another can replace"
        if (threads := len(os.listdir("/proc/self/task"))) != 1:
            return f"it has {threads} threads, and cannot be forked"
        return None

    def _reset_in_child(self, connection: socket.socket) -> None:
        """Drop the state of the warm process in an engine that it forked."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                key.fileobj.close()
        connection.close()
        self.selector.close()


def apply_request(request: dict) -> None:
    """Set up a process as `exec` does: session, file descriptors, signals, environment and
    arguments."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # an engine is stopped by it; a run in the background of a shell begins with it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in (nothing, log):
        os.close(descriptor)
    own = {name: value for name, value in request["environment"].items() if name in PER_ENGINE}
    if api_key := own.pop(KEY_VARIABLE, None):
        change_key(api_key)
    if token := own.get(TOKEN_VARIABLE):
        _show_token(token)
    os.environ.update(own)
    tempfile.tempdir = None
    sys.argv[1:] = request["arguments"]


def _show_token(token: str) -> None:
    """Overwrite the token, which has the same length (`_refusal`), in the memory that
    /proc/PID/environ shows: by it a run finds its engines, also those that another run's process
    forked."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    before, mark, _ = ctypes.string_at(start, end - start).partition(f"{TOKEN_VARIABLE}=".encode())
    ctypes.memmove(start + len(before + mark), token.encode(), len(token))


def run_engine() -> None:
    """Run the engine, and end the process with it, since tearing down the interpreter and its
    imports takes two seconds. Ends as `python -m` would: by SIGINT after a KeyboardInterrupt, else
    with a code."""
    code = 0
    try:
        runpy.run_module(ENGINE_MODULE, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        _exit_process()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # an engine's last words
        traceback.print_exc()
        code = 1
    _exit_process()
    os._exit(code)


def _exit_process() -> None:
    """Write the last output, and exit without waiting for an init that may be slow to reap the
    children that SGLang has killed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    deadline = time.monotonic() + REAP_TIMEOUT_S
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


def _send(connection: socket.socket, message: dict) -> bool:
    """Send a message; return False if the connection is closed."""
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    try:
        main()
    except Exception:  # the driver reads why, and starts engines as it would without
        traceback.print_exc()
        os._exit(1)
    run_engine()
