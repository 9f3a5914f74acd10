"""`miles convert`, in either direction: plan, write beside the target, prove, and only then give
the target its name. Streams, checks itself, and goes on where it was interrupted. Needs no
device."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.journal import PartFolder, require_free
from milescli.console.transfer import Transfer
from milescli.conversion.base import ConversionPlan, Direction
from milescli.conversion.report import Conversion, Proof, write_manifest
from milescli.conversion.verify import Verify, verify_logits
from milescli.conversion.writing import completing, write_files
from milescli.core.units import format_bytes

if TYPE_CHECKING:
    from milescli.console.output import Output

_READ_BACK = "every file read back from the disk: CRC-32 equal to that of the tensors in memory"


def convert(
    direction: Direction,
    target: Path,
    *,
    command: Sequence[str],
    output: Output,
    verify: Verify | None = None,
) -> Conversion:
    """Write `target`, which must not exist. `command`: the words that the user typed, to be
    typed once more after an interruption. `verify` None: logits where the model fits into
    memory, else tensors.

    Raises CheckpointError for a source that is not what its config.json says, a target that is
    there or was begun with other options, a full disk; MismatchError where it computes
    something else; Stopped after Ctrl-C.
    """
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
                    f"going on: {format_bytes(resumed)} in {len(part.finished)} files are there "
                    "from an earlier attempt"
                )
            with Transfer(
                output, label="converting", total=plan.size_bytes, done=resumed
            ) as transfer:
                write_files(part, plan.files, progress=transfer)
            with completing(part):
                plan.write_rest(part.path)
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
    """The command with further options, as a shell takes it. What stands behind `--` is none."""
    end = command.index("--") if "--" in command else len(command)
    return shlex.join([*command[:end], *options, *command[end:]])
