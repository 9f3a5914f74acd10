"""Ends processes that outlived a run because its driver, parent and watchdog were killed or
stopped, and removes folders of killed evaluations and chats. The next command that works on the run
does this."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.run_dir import RunDir, is_locked, verdict_file
from milescli.checkpoint.run_lock import lock
from milescli.cluster.watchdog import has_watchdog, wait_for_clean_up
from milescli.core.files import read_json
from milescli.core.run_processes import processes_of

if TYPE_CHECKING:
    from milescli.console.output import Output

NOTE = ".session.json"
"""File in the log folder of a session."""
_SCRATCH = re.compile(r"/tmp/miles-\w+")
"""Pattern of the only folders that are removed, whatever a note says."""


def write_note(log_dir: Path, *, token: str, scratch_dir: Path) -> None:
    """Write the note of a new session: the token of its processes, and its scratch folder outside
    the run."""
    note = {"token": token, "scratch_dir": str(scratch_dir)}
    with suppress(OSError):  # a full disk is told of by what a run cannot do without
        (log_dir / NOTE).write_text(json.dumps(note) + "\n", encoding="utf-8")


@contextmanager
def locked_without_orphans(run: RunDir, *, output: Output) -> Iterator[None]:
    """Hold the run's lock within the context, after ending the processes that earlier sessions have
    left on this computer. An attempt without a verdict gets that of a killed driver. Raises as
    `lock`, and MachineError if processes cannot be ended."""
    with lock(run):
        _end_left_behind(run, output=output)
        for folder in (*run.path.glob(".eval-*"), *run.path.glob(".chat-*")):
            # of evaluations and chats that were killed; a chat that goes on holds its own lock
            if not folder.is_symlink() and not is_locked(RunDir(folder)):
                shutil.rmtree(folder, ignore_errors=True)
        yield


def _end_left_behind(run: RunDir, *, output: Output) -> None:
    for note in sorted((run.path / "logs").glob(f"*/{NOTE}")):
        token, scratch_dirs = _read(note)
        left = list(processes_of(token)) if token else []
        if left or scratch_dirs:
            where = note.parent.relative_to(run.path)
            if has_watchdog(token):
                output.note(
                    f"the driver of {where} was killed: its watchdog is ending the remaining "
                    "processes"
                )
            elif left:
                output.warn(
                    f"the driver of {where} was killed, and it has no watchdog: ending its "
                    f"{len(left)} remaining processes now"
                )
            wait_for_clean_up(
                token=token, scratch_dirs=scratch_dirs, verdict=verdict_file(note.parent)
            )
        note.unlink(missing_ok=True)


def _read(note: Path) -> tuple[str, list[Path]]:
    """Return the token, and our folders that exist; nothing if the note is incomplete."""
    try:
        fields = read_json(note)
        token, folder = str(fields["token"]), Path(str(fields["scratch_dir"]))
    except (OSError, ValueError, KeyError, TypeError):
        return "", []
    try:
        is_ours = folder.lstat().st_uid == os.getuid()
    except OSError:
        is_ours = False
    may_go = is_ours and _SCRATCH.fullmatch(str(folder)) and not folder.is_symlink()
    return token, [folder] if may_go and token else []
