"""Runs `miles convert` in either direction: plans, writes next to the target, verifies, and only
then renames to the target. Streams, checks itself, and resumes after an interruption. Needs no
device."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint import integrity
from milescli.checkpoint.journal import PartFolder, require_free
from milescli.checkpoint.pipeline import DiskFull, Pipeline, PlannedFile
from milescli.console.transfer import Transfer
from milescli.conversion.base import ConversionPlan, Direction
from milescli.conversion.report import Conversion, Proof, write_manifest
from milescli.conversion.verify import Verify, verify_logits
from milescli.core.errors import DISK_FULL, CheckpointError, MilesError, Stopped
from milescli.core.units import format_bytes

if TYPE_CHECKING:
    from milescli.console.output import Output


_SPARE_BYTES = 16 * 2**20
"""Bytes for metadata, config and tokenizer, and for the file system itself."""


def write_files(
    part: PartFolder, files: Sequence[PlannedFile], *, progress: Callable[[int], None]
) -> None:
    """Write the missing files. Keeps finished ones after Ctrl-C or on a full disk; after any other
    error, keeps nothing."""
    _require_space(part, _bytes_left(part, files))
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
            error.fixes += _resume_or_discard_commands(part)
        else:
            part.discard()
        raise


@contextmanager
def discarding_on_failure(part: PartFolder) -> Iterator[None]:
    """Guard the block that writes the small files and verifies the result: a failure removes
    everything, except that a full disk and Ctrl-C leave the finished files."""
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
        fix=_resume_or_discard_commands(part),
    )


def _resume_or_discard_commands(part: PartFolder) -> list[str]:
    """Return the command that resumes from the finished files and the one that discards them."""
    resume = f"{part.command}   # goes on" if part.command else "the same once more: it goes on"
    return [resume, f"rm -r {shlex.quote(str(part.path))}   # throws it away"]


def _bytes_left(part: PartFolder, files: Sequence[PlannedFile]) -> int:
    return sum(file.size_bytes for file in files if file.name not in part.finished)


def _require_space(part: PartFolder, left: int) -> None:
    free, needed = integrity.free_bytes(part.path), left + _SPARE_BYTES
    if not left or free >= needed:
        return
    done = part.finished_bytes
    if not part.finished:
        part.discard()
    written = f" beside the {format_bytes(done)} that are written" if done else ""
    raise CheckpointError(
        "the disk does not have enough space",
        why=f"{format_bytes(needed)} are needed{written}, but {format_bytes(free)} are free in "
        f"{part.target.parent}: {format_bytes(needed - free)} are missing",
        fix=[
            *([f"{part.command}   # when there is enough space"] if part.command else []),
            "choose a target on another disk",
        ],
    )


def _disk_full(part: PartFolder, files: Sequence[PlannedFile]) -> CheckpointError:
    left, free = _bytes_left(part, files) + _SPARE_BYTES, integrity.free_bytes(part.path)
    missing = (
        f"free another {format_bytes(left - free)}"
        if left > free
        else "a quota or a limit on the size of files may allow less"
    )
    return CheckpointError(
        "the disk is full",
        why=f"{format_bytes(part.finished_bytes)} are finished and stored in {part.path}; "
        f"{format_bytes(left)} remain to be written, and {format_bytes(free)} are free: {missing}",
        fix=_resume_or_discard_commands(part),
    )


_READ_BACK = "every file read back from the disk: CRC-32 equal to that of the tensors in memory"


def convert(
    direction: Direction,
    target: Path,
    *,
    command: Sequence[str],
    output: Output,
    verify: Verify | None = None,
) -> Conversion:
    """Write `target`, which must not exist. `command` is the user's command line, to repeat after
    an interruption. `verify` None: compare logits if the model fits into memory, else tensors.
    Raises CheckpointError for a source that contradicts its config.json, a target that exists or
    was begun with other options, or a full disk; MismatchError if the result computes something
    else; Stopped after Ctrl-C."""
    began = time.monotonic()
    target = target.absolute()
    require_free(target)
    with direction.plan(output=output) as plan:
        for note in plan.notes:
            output.note(note)
        with PartFolder(
            target,
            fingerprint=plan.fingerprint,
            command=_with_options(command, plan.resume_options),
            read_back=verify is not Verify.NONE,
        ) as part:
            resumed = part.finished_bytes
            if resumed:
                output.note(
                    f"continuing: {format_bytes(resumed)} in {len(part.finished)} files exist "
                    "from an earlier attempt"
                )
            with Transfer(
                output, label="converting", total=plan.size_bytes, done=resumed
            ) as transfer:
                write_files(part, plan.files, progress=transfer)
            with discarding_on_failure(part):
                plan.write_small_files(part.path)
                proof = _prove(plan, part, verify=verify, output=output)
                write_manifest(
                    part, plan, direction=direction.name, given_as=direction.source, proof=proof
                )
                part.complete()
        return Conversion(
            direction=direction.name,
            path=str(target),
            family=plan.table.facts.family,
            num_parameters=plan.table.num_parameters,
            size_bytes=plan.size_bytes,
            seconds=time.monotonic() - began,
            bytes_per_s=transfer.per_s,
            resumed_bytes=resumed,
            proof=proof,
            notes=plan.notes,
        )


def _prove(
    plan: ConversionPlan, part: PartFolder, *, verify: Verify | None, output: Output
) -> Proof:
    folder, checkpoint = plan.logits_of(part.path)
    compared, difference = verify_logits(
        folder, checkpoint, table=plan.table, verify=verify, output=output
    )
    return Proof(
        num_source_tensors=plan.num_source_tensors,
        num_target_tensors=plan.num_target_tensors,
        dtypes=plan.dtypes,
        checksums="not compared (--verify none)" if verify is Verify.NONE else _READ_BACK,
        logits=compared,
        logits_difference=difference,
    )


def _with_options(command: Sequence[str], options: Sequence[str]) -> str:
    """Return the command with further options, quoted for a shell. Words after `--` are no
    options."""
    end = command.index("--") if "--" in command else len(command)
    return shlex.join([*command[:end], *options, *command[end:]])
