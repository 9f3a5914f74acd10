"""Errors that tell what went wrong, why, and how to mend it; and the exit codes. Raised everywhere,
printed at one door."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of an OSError that are nobody's fault but the disk's."""


class ExitCode(IntEnum):
    """What the process says when it ends; shown to users by `miles help exit-codes`."""

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
    ExitCode.FAILED: "the operation failed, and the error says why",
    ExitCode.USAGE: "the command line was not understood",
    ExitCode.INVALID: "a recipe, an override or the data is invalid",
    ExitCode.NOT_READY: "the machine is not ready (see `miles doctor`)",
    ExitCode.DOES_NOT_FIT: "the plan does not fit on the machine",
    ExitCode.CHECKPOINT: "a checkpoint is missing, incompatible or corrupt",
    ExitCode.INTERNAL: "a fault of miles itself; the traceback is in the named file",
    ExitCode.RESUMABLE: "stopped, but saved: `miles resume RUN` goes on",
    ExitCode.INTERRUPTED: "Ctrl-C, and nothing could be saved",
    ExitCode.TERMINATED: "SIGTERM, and nothing could be saved",
}


class MilesError(Exception):
    """An error that a user can act on. Crosses process borders (picklable)."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, what: str, *, why: str, fix: str | list[str]) -> None:
        """`what` failed, `why` with the numbers, `fix`: one or more commands or actions, the best
        first."""
        super().__init__(what)
        self.what = what
        self.why = why
        self.fixes = [fix] if isinstance(fix, str) else list(fix)

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


def _rebuild(kind: type[MilesError], what: str, why: str, fixes: list[str]) -> MilesError:
    return kind(what, why=why, fix=fixes)


class RecipeError(MilesError, ValueError):
    """A recipe, an override or an environment setting that cannot be honoured."""

    exit_code = ExitCode.INVALID


class DataError(MilesError, ValueError):
    """Prompts, labels, a tokenizer or a reward that cannot be used."""

    exit_code = ExitCode.INVALID


class MachineError(MilesError, RuntimeError):
    """The machine lacks something that the run needs."""

    exit_code = ExitCode.NOT_READY


def unreadable(folder: Path, error: OSError, *, what: str) -> MachineError:
    """Of a folder that another user keeps to himself. `what`: run, or runs folder."""
    return MachineError(
        f"the {what} {folder} may not be read",
        why=f"{error.strerror}: {error.filename}; a run can be read by its owner alone",
        fix=f"chmod -R a+rX {folder}   # by its owner: samples and data may be private",
    )


class FitError(MilesError, ValueError):
    """A layout that is illegal or does not fit on the machine."""

    exit_code = ExitCode.DOES_NOT_FIT


class OutOfMemory(FitError):
    """A process of the run asked for more memory than its device or its computer has."""


class CheckpointError(MilesError, OSError):
    """A checkpoint or a model folder that is missing, incompatible or corrupt."""

    exit_code = ExitCode.CHECKPOINT

    def __str__(self) -> str:
        return MilesError.__str__(self)


class RewardError(MilesError, RuntimeError):
    """A reward function raised; carries its traceback in `why`."""


class AgentError(MilesError, RuntimeError):
    """An agent raised, or broke its contract; carries its traceback in `why`."""


class ContextFull(AgentError):
    """A conversation has no room for another response; agents end their episode there."""


class EndpointError(MilesError, RuntimeError):
    """A server that was asked by HTTP did not answer, or not with what was asked for."""


class WorkerDied(MilesError, RuntimeError):
    """A process of the run ended although nobody asked it to."""


class WorkerKilled(WorkerDied):
    """It was ended from outside, or by a crash without a word, and did not say what is wrong:
    another one may live."""


class NodeDied(WorkerDied):
    """A computer of the run is gone, with all that was there."""


class WaitTimeout(MilesError, TimeoutError):
    """A wait reached its bound. Says who waited for whom, for what, how long, and when the other
    last spoke."""

    def __str__(self) -> str:
        return MilesError.__str__(self)


class MismatchError(MilesError, ArithmeticError):
    """Engine and trainer, or sent and held weights, differ by more than the precision allows."""


class NotFiniteError(MilesError, ArithmeticError):
    """A loss, a gradient or a weight is NaN or infinite."""


class Stopped(MilesError):
    """The user asked the run to stop; it was saved and can go on."""

    exit_code = ExitCode.RESUMABLE


class NodesJoined(Stopped):
    """A run that had lost nodes can have more than it uses: it was saved, and begins again with
    them."""


class Interrupted(MilesError):
    """The user ended the run before anything could be saved."""

    exit_code = ExitCode.INTERRUPTED


class Terminated(MilesError):
    """SIGTERM ended the run before anything could be saved."""

    exit_code = ExitCode.TERMINATED


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` was probably meant to be, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None
