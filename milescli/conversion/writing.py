"""The files of a conversion are written, and what stops it is said: a disk that is too small or
runs full, Ctrl-C. What is finished stays for the next attempt. Called by `convert` and `unpack`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from milescli.checkpoint import integrity
from milescli.checkpoint.journal import PartFolder
from milescli.checkpoint.pipeline import DiskFull, Pipeline, PlannedFile
from milescli.core.errors import DISK_FULL, CheckpointError, MilesError, Stopped
from milescli.core.units import format_bytes

_SPARE_BYTES = 16 * 2**20
"""Room for metadata, config and tokenizer, and for the file system's own needs."""


def write_files(
    part: PartFolder, files: Sequence[PlannedFile], *, progress: Callable[[int], None]
) -> None:
    """Write what is missing. What is finished stays after Ctrl-C or on a full disk; after any other
    error nothing does."""
    _require_room(part, _bytes_left(part, files))
    try:
        Pipeline(part, progress=progress).run(files)
    except DiskFull as error:
        raise _disk_full(part, files) from error.__cause__
    except KeyboardInterrupt:
        if part.command is None:
            raise
        total = sum(file.size_bytes for file in files)
        raise _interrupted(
            part, f"{format_bytes(part.finished_bytes)} of {format_bytes(total)} are finished"
        ) from None
    except CheckpointError as error:
        # what a disk or a network failed to read may be read the next time; anything else will be
        # wrong again
        if isinstance(error.__cause__, OSError):
            error.fixes += _ways_out(part)
        else:
            part.discard()
        raise


@contextmanager
def completing(part: PartFolder) -> Iterator[None]:
    """While the small files are written and the whole is proven: what fails leaves nothing, but a
    full disk and Ctrl-C leave what is finished."""
    try:
        yield
    except MilesError:
        part.discard()
        raise
    except OSError as error:
        if error.errno in DISK_FULL:
            raise _disk_full(part, []) from error
        raise
    except KeyboardInterrupt:
        raise _interrupted(part, "everything is written but not proven yet") from None


def _interrupted(part: PartFolder, how_far: str) -> Stopped:
    return Stopped(
        "the conversion was interrupted",
        why=f"{how_far}, and kept in {part.path}",
        fix=_ways_out(part),
    )


def _ways_out(part: PartFolder) -> list[str]:
    """What goes on with what is finished, and what throws it away."""
    resume = f"{part.command}   # goes on" if part.command else "the same once more: it goes on"
    return [resume, f"rm -r {shlex.quote(str(part.path))}   # throws it away"]


def _bytes_left(part: PartFolder, files: Sequence[PlannedFile]) -> int:
    return sum(file.size_bytes for file in files if file.name not in part.finished)


def _require_room(part: PartFolder, left: int) -> None:
    free, needed = integrity.free_bytes(part.path), left + _SPARE_BYTES
    if not left or free >= needed:
        return
    done = part.finished_bytes
    if not part.finished:
        part.discard()
    beside = f" beside the {format_bytes(done)} that are written" if done else ""
    raise CheckpointError(
        "the disk has not room enough",
        why=f"{format_bytes(needed)} are needed{beside}, and {format_bytes(free)} are free in "
        f"{part.target.parent}: {format_bytes(needed - free)} are missing",
        fix=[
            *([f"{part.command}   # when there is room"] if part.command else []),
            "choose a target on another disk",
        ],
    )


def _disk_full(part: PartFolder, files: Sequence[PlannedFile]) -> CheckpointError:
    left, free = _bytes_left(part, files) + _SPARE_BYTES, integrity.free_bytes(part.path)
    missing = (
        f"{format_bytes(left - free)} more" if left > free else "more than a quota or limit grants"
    )
    return CheckpointError(
        "the disk is full",
        why=f"{format_bytes(part.finished_bytes)} are finished and kept in {part.path}; "
        f"{format_bytes(left)} are still to be written, and {format_bytes(free)} are free: "
        f"{missing} must be had",
        fix=_ways_out(part),
    )
