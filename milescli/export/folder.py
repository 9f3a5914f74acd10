"""Writes a Hugging Face folder under a temporary name, reads it back, compares, and only then moves
it into place. Called by the runtime's export. The weights come from a function that yields them
tensor by tensor, and is called twice: to write, and to compare with the disk."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import math
import os
import secrets
import shlex
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError

from milescli.checkpoint.formats.base import Scheme
from milescli.checkpoint.formats.schemes import has_power_scales, scheme_of
from milescli.checkpoint.formats.stored import Named, stored
from milescli.checkpoint.hf_folder import (
    SINGLE_NAME,
    HfReader,
    shard_files,
    write_index,
    write_tensors,
)
from milescli.checkpoint.matching import match
from milescli.checkpoint.record import copy_non_weights, read_record
from milescli.checkpoint.source import QuantisedReader, Source, open_source
from milescli.core.errors import CheckpointError, MachineError, MilesError
from milescli.core.units import format_bytes
from milescli.export.config import exported_config, patterns_of_passed, with_untied_embeddings
from milescli.export.stored import ReadBackErrors, compare, plain, read_entries
from milescli.models import load_facts
from milescli.models.base import CONFIG_NAME, WeightTable, read_config
from milescli.models.layers import OUTPUT_LAYER
from milescli.models.precision import (
    FORMATS,
    Choice,
    Quantised,
    modules_left_plain,
    with_single_experts,
)
from milescli.models.precision import choose as choose_whole

Plain = Literal["bf16", "fp16", "fp32"]
PLAIN_DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ReadTensors = Callable[[WeightTable], Iterator[Named]]
"""Maps a table to (name on disk, tensor) of its weights in order; those of MTP layers may be
missing."""
Choose = Callable[[WeightTable, Quantised], Mapping[str, Choice]]
Watch = Callable[[int], AbstractContextManager[Callable[[int], object]]]
Deliver = Callable[[Path, str, Callable[[int], object]], object]
"""(file, name, progress): takes over a complete file of weights, by its name in the folder, and
tells `progress` of its bytes; afterwards it is removed."""
_OTHER_FOLDER = "--to DIR   # on another disk"
_OTHER_SCRATCH = "export TMPDIR=DIR   # on another disk; then export again"
_NOT_CARRIED = ("README.md", "hf_quant_config.json")
"""Files of the base model that are not copied: its card, and ModelOpt's description of its
quantisation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFolder:
    """Describes what was written."""

    path: Path
    format: str
    """bf16, fp16, fp32, fp8, mxfp8, int4, nvfp4 or mxfp4"""
    size_bytes: int
    """Bytes of the weights."""
    measured: ReadBackErrors
    copied: tuple[str, ...] = ()
    """Untrained tensors from the base model's folder: `MTP layers (18 tensors)`."""
    notes: tuple[str, ...] = ()
    """Notes for the user about the folder."""


@dataclass(slots=True, kw_only=True)
class _Job:
    """Describes what is written, and how."""

    table: WeightTable
    """Table with the names that are written."""
    base_table: WeightTable
    """Table with the names of the base model's folder."""
    choices: Mapping[str, Choice]
    scheme: Scheme | None
    """Quantisation scheme of the quantised tensors."""
    read: ReadTensors
    base: Source | None
    dtypes: dict[str, torch.dtype]
    passed: list[str]
    done: Callable[[int], object] = lambda num_bytes: None
    """Called with the bytes of each finished tensor."""
    copied_mtp: list[str] = field(default_factory=list)
    absent_mtp: list[str] = field(default_factory=list)
    """Names of MTP tensors that config.json has, but neither the weights nor the base model."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors, at 16 bits per element."""
        shapes = [
            *self.table.hf_shapes().values(),
            *(self.base.shape(name) for name in self.passed if self.base),
        ]
        return sum(2 * math.prod(shape) for shape in shapes)

    def tensors(self) -> Iterator[Named]:
        """Yield every plain tensor of the folder: the given weights, then the base model's
        others."""
        for name, tensor in self._plain():
            yield name, tensor
            self.done(2 * tensor.numel())

    def stored(self) -> Iterator[Named]:
        """Yield every tensor as the format stores it."""
        return stored(
            self.tensors(),
            self.choices,
            self.scheme,
            plain=lambda name, tensor: plain(tensor, self.dtypes[name]),
            where="the weights that are exported",
        )

    def _plain(self) -> Iterator[Named]:
        expected = dict.fromkeys(name for entry in self.table.entries for name in entry.hf)
        mtp = {name for entry in self.table.entries if entry.mtp is not None for name in entry.hf}
        copies, ends = _copies_in_mtp(self.table), dict[str, torch.Tensor]()
        for name, tensor in self.read(self.table):
            expected.pop(name)
            ends |= dict.fromkeys(copies.get(name, ()), tensor)
            yield name, tensor
        if mtp - expected.keys():  # the layers were trained, with the model's own ends
            for name in [name for name in ends if name in expected]:
                expected.pop(name)
                yield name, ends[name].clone()
        if lacking := [name for name in expected if name not in mtp]:
            raise _missing_weight_error(lacking[0])
        copied = []
        if self.base is not None:
            untrained = [entry for entry in self.table.entries if entry.hf[0] in expected]
            for name, tensor in read_entries(self.base, untrained, on_disk=self.base_table):
                copied.append(name)
                yield name, tensor
        self.copied_mtp = copied
        self.absent_mtp = [name for name in expected if name not in copied]
        for name in self.passed:
            assert self.base is not None
            yield name, self.base.read(name)


def _copies_in_mtp(table: WeightTable) -> dict[str, list[str]]:
    """Map the names of the embedding and of the output layer to the names of the copies that MTP
    layers have of them."""
    copies = defaultdict[str, list[str]](list)
    for entry in table.entries:
        if entry.mtp is not None and entry.rule.optional:
            whole = table.by_megatron.get(entry.megatron.removeprefix(f"mtp.layers.{entry.mtp}."))
            if whole is not None:
                copies[whole.hf[0]] += entry.hf
    return copies


def write_folder(
    out: Path,
    *,
    table: WeightTable,
    read: ReadTensors,
    base: Path,
    format: str,
    card: Callable[[WrittenFolder], Mapping[str, str]],
    watch: Watch = lambda total: nullcontext(lambda num_bytes: None),
    max_shard_bytes: int = 4 * 2**30,
    choose: Choose = choose_whole,
    plain_format: Plain = "bf16",
    deliver: Deliver | None = None,
) -> WrittenFolder:
    """Write `out`, which must not exist, and return what was written. `base` provides config,
    tokenizer and untrained parts; it may lack weights. `card` maps the result to file name -> text.
    `watch` gets the total bytes to write and read back, and then those of each tensor. `choose`
    selects the tensors that a format quantises; `plain_format` is the format of the others. With
    `deliver`, each file of weights is handed over after it was read back, and `out` gets the other
    files: the disk needs space for one.

    Raises CheckpointError if `out` is in use, the disk is too small, a weight is missing, or
    reading back shows a difference; then nothing is left."""
    refuse_existing(out)
    with atomic_folder(out) as part:
        with ExitStack() as open_files:
            job, config, notes = _plan(
                table,
                read,
                base,
                format=format,
                choose=choose,
                plain_format=plain_format,
                open_files=open_files,
            )
            stored_bytes = _require_space(part, job, at_once=max_shard_bytes if deliver else None)
            to_deliver = stored_bytes if deliver is not None else 0
            job.done = open_files.enter_context(watch(2 * job.num_bytes + to_deliver))
            if deliver is None:
                size = _write(part, job, max_shard_bytes=max_shard_bytes)
            else:
                size, measured = _stream(
                    part, job, config, deliver=deliver, max_shard_bytes=max_shard_bytes
                )
            copy_non_weights(base, part)
            for name in _NOT_CARRIED:
                (part / name).unlink(missing_ok=True)
            (part / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            if deliver is None:
                with open_source(part) as source:
                    measured = compare(job.tensors(), source, job.choices, job.dtypes, job.scheme)
            if job.absent_mtp:
                notes.append(
                    "config.json has multi-token-prediction layers whose weights are nowhere: "
                    f"{len(job.absent_mtp)} tensors lack"
                )
            done = WrittenFolder(
                path=out,
                format=format,
                size_bytes=size,
                measured=measured,
                copied=_copied(job),
                notes=tuple(notes),
            )
        for name, text in card(done).items():
            (part / name).write_text(text, encoding="utf-8")
    return done


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Provide a folder to write, whose content is in `out` after the block; remove it on an error.
    An empty `out` may be the place where a disk is mounted, or a link: it stays, and the content is
    moved into it, config.json last."""
    out = out.expanduser().resolve()
    is_there = out.is_dir()
    part = out / _PART if is_there else out.with_name(f".{out.name}{_PART}")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(part)
        part = part.with_name(f"{part.name}{secrets.token_hex(4)}")
        part.mkdir()
    except OSError as error:
        raise MachineError(
            f"the folder {out} cannot be created",
            why=f"{type(error).__name__}: {error.strerror}",
            fix=f"ls -ld {shlex.quote(str(out.parent))}   # who may write there?",
        ) from error
    try:
        with ExitStack() as lock:
            with suppress(OSError):  # where there are no locks, nothing is found abandoned, either
                lock.enter_context(_locked(part))
            yield part
            refuse_existing(out)
            if is_there:
                _move_up(part)
            else:
                part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


_PART = ".part-"
"""Part of the names of folders that are written."""


def _move_up(part: Path) -> None:
    """Move the content of a folder into the folder that it is in, and remove it. On an error,
    nothing of it stays there."""
    moved = list[Path]()
    try:
        for entry in sorted(part.iterdir(), key=lambda entry: entry.name == CONFIG_NAME):
            moved.append(entry.rename(part.parent / entry.name))
    except BaseException:
        for entry in moved:
            entry.rename(part / entry.name)
        raise
    part.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, so that no other export takes it for abandoned. Raises OSError if another has
    locked it, or its file system has no locks."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def _remove_abandoned(part: Path) -> None:
    """Remove folders of exports that were killed, whose names begin with that of `part`."""
    for found in part.parent.glob(f"{glob.escape(part.name)}*"):
        with suppress(OSError), _locked(found):
            shutil.rmtree(found)


def refuse_existing(out: Path) -> None:
    """Raise CheckpointError if there is a file or a folder with content at `out`."""
    if not out.exists() or (out.is_dir() and not any(map(_is_content, out.iterdir()))):
        return
    is_mount = os.path.ismount(out)
    other = shlex.join(["--to", str(out / "model") if is_mount else f"{out}-2"])
    raise CheckpointError(
        f"{out} already exists",
        why="an export never overwrites existing files",
        fix=[other] if is_mount else [other, shlex.join(["mv", f"{out}", f"{out}.old"])],
    )


def _is_content(entry: Path) -> bool:
    """Return False for what an unfinished export left, and for what an empty disk has."""
    return not entry.name.startswith(_PART) and entry.name != "lost+found"


def _plan(
    table: WeightTable,
    read: ReadTensors,
    base: Path,
    *,
    format: str,
    choose: Choose,
    plain_format: Plain,
    open_files: ExitStack,
) -> tuple[_Job, dict[str, object], list[str]]:
    """Return (what is written, config.json, notes)."""
    base_config = read_config(base)
    is_untied = load_facts(base).tied_embeddings and not (
        table.facts.tied_embeddings or table.facts.scores
    )
    source, base_table, passed = _open_base(
        base, table.tied() if is_untied else table, open_files=open_files
    )
    if is_untied:
        base_config = with_untied_embeddings(base_config)
        base_table = table.as_on_disk([*base_table.hf_shapes(), *OUTPUT_LAYER.hf])
    form: Quantised | None = format if format in get_args(Quantised) else None  # type: ignore[assignment]
    table = with_single_experts(base_table) if form not in (None, "mxfp4") else base_table
    powers = has_power_scales(base_config)
    choices = choose(table, form) if form else {}
    dtype = PLAIN_DTYPES.get(format, PLAIN_DTYPES[plain_format])
    dtypes = {
        name: torch.float32 if entry.rule.float32 else getattr(torch, dtype)
        for entry in table.entries
        for name in entry.hf
    }
    dtypes |= {name: source.dtype(name) for name in passed if source}
    plain_modules = [
        *modules_left_plain(choices, table.facts),
        *(patterns_of_passed(passed, form) if form else []),
    ]
    config = exported_config(
        base_config, dtype=dtype, form=form, plain_modules=plain_modules, power_scales=powers
    )
    job = _Job(
        table=table,
        base_table=base_table,
        choices=choices,
        scheme=scheme_of(form, base_config) if form else None,
        read=read,
        base=source,
        dtypes=dtypes,
        passed=passed,
    )
    return job, config, _notes(source, choices)


def _open_base(
    base: Path, table: WeightTable, *, open_files: ExitStack
) -> tuple[Source | None, WeightTable, list[str]]:
    """Return (the base model's weights, the table in their form, names of those that Megatron has
    no place for). Of a converted model only the latter exist, and a record of the others."""
    if (record := read_record(base)) is not None:
        source = (
            open_files.enter_context(HfReader(base)) if any(base.glob("*.safetensors")) else None
        )
        return (
            source,
            table.as_on_disk(list(record.dtypes), record.shape),
            source.names() if source else [],
        )
    if not any(base.glob("*.safetensors")):
        return None, table, []
    opened = open_files.enter_context(open_source(base))
    matched = match(opened, table)
    return opened, matched.table, list(matched.passthrough)


def _notes(source: Source | None, choices: Mapping[str, Choice]) -> list[str]:
    notes = []
    uneven = [choice for choice in choices.values() if "multiple of" in choice.reason]
    if uneven:
        notes.append(
            f"{len(uneven)} matrices stay in BF16: of `{uneven[0].name}`, {uneven[0].reason}"
        )
    if any("lie stacked" in choice.reason for choice in choices.values()):
        notes.append(
            "the experts stay in BF16: they lie stacked, and no engine loads them so in this format"
        )
    if isinstance(source, QuantisedReader) and not choices:
        notes.append(
            f"the base model is stored as {source.method}; this folder holds plain weights"
        )
    return notes


def _write(part: Path, job: _Job, *, max_shard_bytes: int) -> int:
    with _as_checkpoint_error(part, fix=_OTHER_FOLDER):
        return write_tensors(part, job.stored(), max_shard_bytes=max_shard_bytes)


def _stream(
    part: Path,
    job: _Job,
    config: Mapping[str, object],
    *,
    deliver: Deliver,
    max_shard_bytes: int,
) -> tuple[int, ReadBackErrors]:
    """Write the weights file by file: compare each with the weights, which are made again, and hand
    it over; then write the index. Return (bytes of all tensors, result of reading back)."""
    parts = _parts_of(job)
    owner = {name: plain_name for plain_name, names in parts.items() for name in names}

    def is_whole(names: Iterable[str]) -> bool:
        there = set(names)
        return all(parts[owner[name]] <= there for name in there if name in owner)

    again, measured, weight_map = _SecondPass(job.tensors()), ReadBackErrors(), dict[str, str]()
    number = total = 0
    alone = part / "shard"  # a folder that holds one file can be read back by itself
    alone.mkdir()
    (alone / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
    with _as_checkpoint_error(part, fix=_OTHER_SCRATCH):
        for shard in shard_files(
            part, job.stored(), max_shard_bytes=max_shard_bytes, may_end=is_whole
        ):
            number += 1
            file = shard.file.rename(alone / SINGLE_NAME)
            tensors = again.of({owner.get(name, name) for name in shard.names})
            # what has no quantised tensor is no quantised folder
            is_quantised = not owner.keys().isdisjoint(shard.names)
            with open_source(alone) if is_quantised else HfReader(alone) as source:
                measured.add(compare(tensors, source, job.choices, job.dtypes, job.scheme))
            # how many files there will be is not known yet
            is_only = shard.is_last and number == 1
            final = SINGLE_NAME if is_only else f"model-{number:05d}.safetensors"
            weight_map |= dict.fromkeys(shard.names, final)
            total += shard.num_bytes
            deliver(file, final, job.done)
            file.unlink()
    shutil.rmtree(alone)
    if number > 1:
        write_index(part, weight_map, total=total)
    return total, measured


def _parts_of(job: _Job) -> dict[str, set[str]]:
    """Return the names of the parts of each quantised tensor, which must be in one file to be read
    back."""
    if job.scheme is None:
        return {}
    return {
        name: set(job.scheme.names(name).values())
        for name, choice in job.choices.items()
        if choice.form is not None
    }


class _SecondPass:
    """Yields tensors a second time, some at a time; keeps those that come before they are
    requested."""

    def __init__(self, tensors: Iterator[Named]) -> None:
        self._tensors, self._waiting = tensors, dict[str, torch.Tensor]()

    def of(self, names: set[str]) -> Iterator[Named]:
        """Yield the tensors of these names."""
        left = set(names)
        for name in left & self._waiting.keys():
            left.remove(name)
            yield name, self._waiting.pop(name)
        while left:
            name, tensor = next(self._tensors)
            if name in left:
                left.remove(name)
                yield name, tensor
            else:
                self._waiting[name] = tensor


@contextmanager
def _as_checkpoint_error(part: Path, *, fix: str) -> Iterator[None]:
    """Raise CheckpointError with this fix if files cannot be written."""
    try:
        yield
    except MilesError:
        raise
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        raise CheckpointError(
            f"the disk of `{part.parent}` is full" if full else f"cannot write to `{part.parent}`",
            why=f"{error}; the incomplete files were removed",
            fix=fix,
        ) from error


def _require_space(part: Path, job: _Job, *, at_once: int | None) -> int:
    """Return the bytes of all weights. `at_once` is the largest size of a file if only one is on
    the disk at a time (a larger tensor has its own file); None means that all are. Raises
    CheckpointError if the disk lacks the space, before hours are spent."""
    sizes = list[int]()
    for name, shape in job.table.hf_shapes().items():
        choice = job.choices.get(name)
        form = choice.form if choice else None
        sizes.append(
            FORMATS[form].bytes_of(shape) if form else math.prod(shape) * job.dtypes[name].itemsize
        )
    needed = sum(sizes)
    free = shutil.disk_usage(part).free
    at_a_time = needed if at_once is None else min(needed, max(at_once, *sizes))
    if at_a_time > free:
        raise CheckpointError(
            f"the disk of `{part.parent}` is too small",
            why=f"the weights need {format_bytes(at_a_time)}"
            + ("" if at_once is None else " at a time")
            + f", but {format_bytes(free)} are free",
            fix=_OTHER_FOLDER if at_once is None else _OTHER_SCRATCH,
        )
    return needed


def _copied(job: _Job) -> tuple[str, ...]:
    parts = []
    if job.copied_mtp:
        parts.append(f"multi-token-prediction layers ({len(job.copied_mtp)} tensors)")
    if job.passed:
        stems = sorted(
            {
                name.split(".")[1] if name.startswith("model.") else name.split(".")[0]
                for name in job.passed
            }
        )
        parts.append(f"{', '.join(stems)} ({len(job.passed)} tensors)")
    return tuple(parts)


def _missing_weight_error(name: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint lacks `{name}`",
        why="config.json says that the model has it, so the checkpoint belongs to another model",
        fix="export with the model.path that the run used",
    )
