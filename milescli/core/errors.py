"""Errors that say what went wrong, why, and how to fix it; and the exit codes. Raised everywhere,
printed in one place."""

from __future__ import annotations

import difflib
import errno
import re
import shlex
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk or quota, for which the code is not to blame."""


class ExitCode(IntEnum):
    """Exit codes of the process; users see them with `miles help exit-codes`."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    INVALID = 3
    NOT_READY = 4
    DOES_NOT_FIT = 5
    CHECKPOINT = 6
    INTERNAL = 70
    RESUMABLE = 75
    INTERRUPTED = 130
    TERMINATED = 143


EXIT_CODE_MEANINGS: dict[ExitCode, str] = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "the operation failed; the error says why",
    ExitCode.USAGE: "the command line is invalid",
    ExitCode.INVALID: "a recipe, an override or the data is invalid",
    ExitCode.NOT_READY: "the machine is not ready (see `miles doctor`)",
    ExitCode.DOES_NOT_FIT: "the plan does not fit on the machine",
    ExitCode.CHECKPOINT: "a checkpoint is missing, incompatible or corrupt",
    ExitCode.INTERNAL: "internal error in miles; the traceback is in the named file",
    ExitCode.RESUMABLE: "stopped and saved: `miles resume RUN` continues",
    ExitCode.INTERRUPTED: "Ctrl-C, and nothing could be saved",
    ExitCode.TERMINATED: "SIGTERM, and nothing could be saved",
}


class MilesError(Exception):
    """Reports an error that a user can act on. Crosses process borders (picklable)."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, what: str, *, why: str, fix: str | list[str]) -> None:
        """State that `what` failed, `why` with the numbers, and `fix`: one or more commands or
        actions, the best first. Each may contain foreign text: it is stored as `printable` returns
        it."""
        self.what, self.why = printable(what), printable(why)
        super().__init__(self.what)
        self.fixes = [printable(one) for one in ([fix] if isinstance(fix, str) else fix)]

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.why, self.fixes)

    def __str__(self) -> str:
        return f"{self.what} (why: {self.why}; fix: {' or '.join(self.fixes)})"

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form that `--json` prints on stderr."""
        return {
            "error": self.what,
            "why": self.why,
            "fix": self.fixes,
            "kind": type(self).__name__,
            "exit_code": int(self.exit_code),
        }


MAX_SHOWN_CHARS = 16_000
"""Most characters of a foreign text that are shown."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, marks that change the direction of a line, and lone surrogates, which UTF-8
cannot encode."""


def shortened(text: str, *, max_chars: int) -> str:
    """Return the beginning and end of a text that is longer, and how much is left out."""
    if (left_out := len(text) - max_chars) <= 0:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n... {left_out:,} characters left out ...\n{text[-half:]}"


def printable(text: str) -> str:
    """Return foreign text, such as the message of an exception in a reward, in a form that can be
    shown and stored anywhere: control characters as escapes, and only the beginning and end of a
    long text."""
    text = shortened(text, max_chars=MAX_SHOWN_CHARS).replace("\r\n", "\n")
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _rebuild(kind: type[MilesError], what: str, why: str, fixes: list[str]) -> MilesError:
    error = kind("", why="", fix=fixes)
    error.what, error.why, error.fixes, error.args = what, why, fixes, (what,)
    return error


class RecipeError(MilesError, ValueError):
    """Reports an invalid recipe, override or environment setting."""

    exit_code = ExitCode.INVALID


class DataError(MilesError, ValueError):
    """Reports unusable prompts, labels, tokenizers or rewards."""

    exit_code = ExitCode.INVALID


class MachineError(MilesError, RuntimeError):
    """Reports that the machine lacks something that the run needs."""

    exit_code = ExitCode.NOT_READY


def unreadable_folder(folder: Path, error: OSError) -> MachineError:
    """Return the error for a run's folder that belongs to another user and cannot be read."""
    return MachineError(
        f"the run {folder} cannot be read",
        why=f"{error.strerror}: {error.filename}; only the owner can read a run",
        fix=f"chmod -R a+rX {shlex.quote(str(folder))}   # as its owner: samples and data may be "
        "private",
    )


class FitError(MilesError, ValueError):
    """Reports a layout that is illegal or does not fit on the machine."""

    exit_code = ExitCode.DOES_NOT_FIT


class MemoryTaken(FitError):
    """Reports that a plan does not fit only because other processes use too much of the main
    memory."""


class OutOfMemory(FitError):
    """Reports that a process of the run exceeded the memory of its device or its computer."""


class CheckpointError(MilesError, OSError):
    """Reports a checkpoint or a model folder that is missing, incompatible or corrupt."""

    exit_code = ExitCode.CHECKPOINT

    def __str__(self) -> str:
        return MilesError.__str__(self)


class RewardError(MilesError, RuntimeError):
    """Reports that a reward function raised; carries its traceback in `why`."""


class AgentError(MilesError, RuntimeError):
    """Reports that an agent raised, or did not satisfy its protocol; carries its traceback in
    `why`."""


class ContextFull(AgentError):
    """Reports that a conversation has no room for another response; agents end their episode
    there."""


class SandboxError(MilesError, RuntimeError):
    """Reports that a sandbox failed, not the code in it."""


class EndpointError(MilesError, RuntimeError):
    """Reports that a server did not answer over HTTP, or answered incorrectly."""


class WorkerDied(MilesError, RuntimeError):
    """Reports that a process of the run ended unexpectedly."""


class WorkerKilled(WorkerDied):
    """Reports that a process was killed, or crashed without a message: a new one may survive."""


class NodeDied(WorkerDied):
    """Reports that a computer of the run is lost, with everything on it."""


class WaitTimeout(MilesError, TimeoutError):
    """Reports that a wait reached its bound: who waited for whom, for what, how long, and when the
    other last responded."""

    def __str__(self) -> str:
        return MilesError.__str__(self)


class MismatchError(MilesError, ArithmeticError):
    """Reports that engine and trainer, or sent and held weights, differ by more than the precision
    allows."""


class NotFiniteError(MilesError, ArithmeticError):
    """Reports that a loss, a gradient or a weight is NaN or infinite."""


class Stopped(MilesError):
    """Reports that the user asked the run to stop; it was saved and can be resumed."""

    exit_code = ExitCode.RESUMABLE


class NodesJoined(Stopped):
    """Reports that a run that had lost nodes can use more again: it was saved, and restarts with
    them."""


class Interrupted(MilesError):
    """Reports that the user ended the run before anything could be saved."""

    exit_code = ExitCode.INTERRUPTED


class Terminated(MilesError):
    """Reports that SIGTERM ended the run before anything could be saved."""

    exit_code = ExitCode.TERMINATED


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` was probably meant to be, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None
