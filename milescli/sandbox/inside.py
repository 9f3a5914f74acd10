"""Runs inside of the jail, before and around the model's code: sets rlimits, writes its files, then
runs the program, or the cells of a session. It does not isolate the code: the jail outside does.

Sent there as compiled code with a job, and executed in a fresh interpreter; it has few and small
imports, because every run loads them. `JOB` is what `Jail.job` made; its `control` is a descriptor:
one byte is written when the job has begun, one is read, and one is written for each cell that is
done."""

from __future__ import annotations

import os
import resource
import sys

STARTED, GO, DONE, RAISED, TIMED_OUT = b"b", b"g", b"d", b"r", b"t"
MAX_FILES_OPEN = 128
_HEADROOM_BYTES = 256 * 1024**2
"""Address space beyond the memory limit: for the interpreter and its libraries."""
_LAST_FRAMES = 8
_SYNTAX_TREE = 0x400


def main(job):
    """Run the job. Never returns if the program exits."""
    _bound(job["limits"], job["max_tasks"])
    for name, content in job["files"].items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)
    sys.path[:0] = [os.getcwd()]
    sys.path += job["packages"]
    sys.argv = ["main.py"]
    scope = sys.modules["__main__"].__dict__
    scope.clear()
    builtins = sys.modules["builtins"]
    builtins.exit = builtins.quit = sys.exit  # as the `site` module would
    scope.update(__name__="__main__", __builtins__=builtins)
    os.write(job["control"], STARTED)
    os.read(job["control"], len(GO))
    if job["code"] is None:
        _serve(job["control"], scope)
    else:
        os.close(job["control"])
        scope["__file__"] = os.path.abspath("main.py")
        _run(job["code"].removeprefix("\ufeff"), scope)


def _bound(limits, max_tasks):
    cpu_s = int(limits["cpu_s"]) + 1
    for kind, most in (
        (resource.RLIMIT_AS, limits["memory_bytes"] + _HEADROOM_BYTES),
        (resource.RLIMIT_DATA, resource.RLIM_INFINITY),  # the supervisor's own
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, MAX_FILES_OPEN),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, max_tasks),
    ):
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            most = hard if most == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def _run(code, scope):
    with open("main.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(code)  # where tracebacks find their lines
    try:
        exec(compile(code, "main.py", "exec", dont_inherit=True), scope)
    except SystemExit:
        raise
    except BaseException as error:
        frames = error.__traceback__ and error.__traceback__.tb_next  # without our own
        sys.__excepthook__(type(error), error.with_traceback(frames), frames)
        sys.exit(1)


def _serve(control, scope):
    """Run cells, each sent as a length, its time limit in ms and its text; send a byte back for
    each."""
    import _signal

    def time_is_up(*_):
        raise TimeoutError("the cell took too long")

    _signal.signal(_signal.SIGALRM, time_is_up)
    number = 0
    while head := _read(control, 12):
        size, bound_ms = int.from_bytes(head[:8], "little"), int.from_bytes(head[8:], "little")
        text = _read(control, size).decode("utf-8", "surrogatepass")
        number += 1
        result = DONE
        try:
            _signal.setitimer(_signal.ITIMER_REAL, bound_ms / 1000)
            _execute(text, f"<cell {number}>", scope)
            _signal.setitimer(_signal.ITIMER_REAL, 0)
        except BaseException as error:
            _signal.setitimer(_signal.ITIMER_REAL, 0)
            is_late = isinstance(error, TimeoutError) and str(error) == "the cell took too long"
            result = TIMED_OUT if is_late else RAISED
            _show(error, text, f"<cell {number}>")
        for stream in (sys.stdout, sys.stderr):
            try:  # noqa: SIM105 - contextlib costs every session some milliseconds
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass  # the cell has closed or replaced it
        os.write(control, result)


def _read(control, size):
    pieces = b""
    while len(pieces) < size:
        piece = os.read(control, size - len(pieces))
        if not piece:
            return b""
        pieces += piece
    return pieces


def _execute(text, name, scope):
    import _ast

    tree = compile(text, name, "exec", _SYNTAX_TREE, dont_inherit=True)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), scope)
    if last is not None:
        exec(compile(_ast.Interactive(body=[last]), name, "single", dont_inherit=True), scope)


def _show(error, text, name):
    """Print the last frames of an error, with the lines of the cell."""
    import linecache
    import traceback

    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    frames = error.__traceback__
    while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<cell "):
        frames = frames.tb_next
    try:
        traceback.print_exception(type(error), error, frames, limit=-_LAST_FRAMES)
    except BaseException:
        os.write(2, type(error).__name__.encode() + b"\n")


if "JOB" in globals():
    main(globals()["JOB"])
