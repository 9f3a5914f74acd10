"""Loads prompts: finds data files, reads and checks their rows, tokenises the prompts, and reports
on them."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from milescli.core.errors import DataError
from milescli.core.types import Prompt
from milescli.data.file_prompts import FilePrompts, StoredPrompts
from milescli.data.file_rows import (
    FileRows,
    describe_row,
    evenly_spread_places,
    first_places,
    group_by_file,
    read_file,
)
from milescli.data.images import PromptImages
from milescli.data.prompt_encoder import PromptEncoder
from milescli.data.rows import NUM_BAD_ROWS_SHOWN, PathField, PromptRowParser
from milescli.data.tables import Table, check_file
from milescli.data.tasks import is_task, write_task
from milescli.data.tokenizer import format_num_tokens
from milescli.recipe.data import Data
from milescli.recipe.data_files import DataFile, names_in, parse_data_file

TASK_FOLDER = "tasks"
"""Below `base_dir`: the folder of the files of `task:NAME`."""
LARGE_ROWS = 100_000
LARGE_BYTES = 256 * 2**20
"""Prompts of files with more rows, or more bytes, are tokenised on demand."""
NUM_MEASURED = 4096
"""Rows of large files whose tokens are counted at the start, evenly spread."""
MAX_LONG_ROWS = 1000

ReportProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """Describes the files of a source, for the manifest and for people."""

    path: str
    sha256: str
    """SHA-256 of the file's bytes."""
    num_rows: int
    """Rows in the file."""
    num_duplicates: int
    """Rows left out by `data.dedup`."""
    num_measured: int
    """Rows whose tokens were counted: all, or evenly spread ones of a large file."""
    num_dropped: int
    """Measured rows whose prompt is longer than `data.max_prompt_tokens`."""
    prompt_key: str
    label_key: str | None
    num_demonstrations: int
    """Rows with a worked response; of a small file, only those that are not dropped."""
    prompt_tokens_p50: int
    """Median over all measured rows, dropped ones included."""
    prompt_tokens_p90: int
    prompt_tokens_p99: int
    prompt_tokens_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPrompts:
    """Holds a source of prompts, and numbers about it."""

    source: FilePrompts
    report: SourceReport
    lengths: list[int]
    """Number of tokens of each measured prompt, ascending."""
    long_rows: list[str]
    """The first measured rows that are longer than `data.max_prompt_tokens`: `row 3 of
    train.jsonl`."""


def load_source(
    data: Data,
    path_field: PathField,
    *,
    tokenizer: PromptEncoder,
    seed: int,
    base_dir: str | Path,
    needs_label: bool | None = True,
    report_progress: ReportProgress | None = None,
    name: str | None = None,
    first_index: int = 0,
    large_rows: int | None = None,
) -> LoadedPrompts:
    """Read and check `data.<path_field>`, and tokenise it if it is small. Relative paths start at
    `base_dir`, where `task:NAME` and Arrow files are written. `needs_label`: whether the reward
    compares with a label (the built-in ones do); `report_progress`: receives lines on the progress,
    if that takes seconds; `name` and `first_index`: for one of several sources, its name in the mix
    and the index of its first row; `large_rows`: files with more rows are tokenised on demand,
    None: `LARGE_ROWS`. Raises DataError for a file that is missing or of another kind, for bad
    rows, and if no prompt is short enough."""
    files = _read(
        _locate(data, path_field, base_dir=Path(base_dir), seed=seed),
        prompt_row_parser(data, path_field, needs_label=needs_label, images=tokenizer.images),
        folder=Path(base_dir),
        report_progress=report_progress,
        source=name,
        first_index=first_index,
    )
    return load_files(
        files,
        data,
        tokenizer=tokenizer,
        seed=seed,
        report_progress=report_progress,
        large_rows=large_rows,
    )


def prompt_row_parser(
    data: Data,
    path_field: PathField,
    *,
    needs_label: bool | None,
    images: PromptImages | None = None,
) -> PromptRowParser:
    """Return the parser of rows for `data.<path_field>`. `images`: how the model reads images."""
    return PromptRowParser(
        field=path_field,
        prompt_key=data.prompt_key,
        label_key=data.label_key,
        system_prompt=data.system_prompt,
        needs_label=needs_label,
        max_tokens=data.max_prompt_tokens,
        ignored=frozenset(names_in(data.ignore_columns)),
        is_raw=data.chat_template == "none",
        images=images and replace(images, fetches=data.remote_images),
    )


def load_files(
    files: Sequence[FileRows],
    data: Data,
    *,
    tokenizer: PromptEncoder,
    seed: int,
    report_progress: ReportProgress | None,
    large_rows: int | None = None,
) -> LoadedPrompts:
    """Tokenise the rows of files without bad rows. Raises DataError as `load_source`."""
    most, num_measured = LARGE_ROWS, NUM_MEASURED
    if large_rows is not None:
        most, num_measured = large_rows, min(NUM_MEASURED, large_rows)
    is_large = sum(map(len, files)) > most or (
        sum(file.table.size_bytes for file in files) > LARGE_BYTES
    )
    dedup = data.dedup == "exact" and files[0].form.field == "prompts"
    places: Sequence[int] = first_places(files) if dedup else range(sum(map(len, files)))
    num_unique = len(places)
    prompts: Sequence[Prompt]
    prompts = stored = StoredPrompts(files, tokenizer, places)
    tick = ProgressReporter(
        report_progress, "making tokens of " + ", ".join(file.spelled for file in files)
    )
    measured = stored.make(
        evenly_spread_places(num_unique, num_measured if is_large else num_unique), tick
    )
    short = _short_enough(measured, data=data, files=files)
    short_prompts = [measured[at] for at in short]
    if not is_large:
        prompts, places = short_prompts, [places[at] for at in short]
    source = FilePrompts(
        prompts,
        seed=seed,
        shuffle=data.shuffle,
        max_tokens=data.max_prompt_tokens,
        refuses_long=data.long_prompts == "error",
        files=files,
        places=places,
    )
    report = _report(files, measured, short_prompts, num_unique=num_unique, is_large=is_large)
    long = [p.index for p in measured if len(p.token_ids) > data.max_prompt_tokens]
    return LoadedPrompts(
        source=source,
        report=report,
        lengths=sorted(len(prompt.token_ids) for prompt in measured),
        long_rows=[describe_row(index, files) for index in long[:MAX_LONG_ROWS]],
    )


def parse_file_name(text: str, *, key: str, folder: str | Path = "") -> DataFile:
    """Parse the name of a file in a recipe. The name of an existing file is taken literally,
    brackets included."""
    if (Path(folder) / Path(text).expanduser()).exists():
        return DataFile(name=text)
    return parse_data_file(text, key=key)


def _locate(data: Data, path_field: PathField, *, base_dir: Path, seed: int) -> list[DataFile]:
    """Return each file of `data.<path_field>` with its absolute path."""
    key = f"data.{path_field}"
    located = []
    for name in names_in(getattr(data, path_field)):
        file = parse_file_name(name, key=key, folder=base_dir)
        if is_task(file.name):
            path = write_task(file.name, base_dir / TASK_FOLDER, seed)
        else:
            path = base_dir / Path(file.name).expanduser()
            check_file(path, field=path_field)
        located.append(replace(file, name=str(path)))
    if not located:
        raise DataError(
            f"`{key}` is not set",
            why="the run has no source of prompts",
            fix=f"--set {key}=FILE.jsonl",
        )
    return located


def _read(
    named: Sequence[DataFile],
    form: PromptRowParser,
    *,
    folder: Path,
    report_progress: ReportProgress | None,
    source: str | None,
    first_index: int,
) -> list[FileRows]:
    """Read each row of the files in one pass. Raises DataError for bad rows, and for a slice
    without rows."""
    files: list[FileRows] = []
    tables = [Table(Path(file.name)) for file in named]
    for file, table in zip(named, tables, strict=True):
        rows = read_file(
            table,
            file,
            form,
            folder=folder,
            first_index=first_index,
            source=source,
            tick=ProgressReporter(report_progress, f"reading {file.spelled()}"),
        )
        if file.start and not rows.num_rows:
            raise DataError(
                f"{table.path} has no row {file.start}",
                why=f"`{file.rows}` starts after the end of the file",
                fix=f"--set {shlex.quote(f'data.{form.field}={file.name}')}",
            )
        rows.require_good()
        files.append(rows)
        first_index += rows.last_line
    return files


def _short_enough(prompts: Sequence[Prompt], *, data: Data, files: Sequence[FileRows]) -> list[int]:
    """Return the places of prompts that are not too long. Raises DataError if there is none, or if
    the recipe refuses long ones."""
    bound = data.max_prompt_tokens
    short = [place for place, prompt in enumerate(prompts) if len(prompt.token_ids) <= bound]
    if len(short) == len(prompts) or (short and data.long_prompts == "drop"):
        return short
    long = [prompt for prompt in prompts if len(prompt.token_ids) > bound]
    (file, rows), *_ = group_by_file(long, files)
    shown = "; ".join(
        f"row {prompt.index + 1}: {format_num_tokens(prompt, bound)}"
        for prompt in rows[:NUM_BAD_ROWS_SHOWN]
    )
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    fixes = [f"--set data.max_prompt_tokens={len(longest.token_ids)}"]
    raise DataError(
        f"{len(long)} of {len(prompts)} prompts of {', '.join(file.spelled for file in files)} are "
        f"longer than {bound} tokens",
        why=f"{shown if len(files) == 1 else f'{file.path}: {shown}'}; the longest has "
        f"{format_num_tokens(longest, bound)}",
        fix=[*fixes, "--set data.long_prompts=drop"] if short else fixes,
    )


def _report(
    files: Sequence[FileRows],
    measured: Sequence[Prompt],
    short_prompts: Sequence[Prompt],
    *,
    num_unique: int,
    is_large: bool,
) -> SourceReport:
    lengths = sorted(len(prompt.token_ids) for prompt in measured)
    num_rows, columns = sum(map(len, files)), files[0].require_good()
    return SourceReport(
        path=", ".join(file.spelled for file in files),
        sha256=_sha256_over(files),
        num_rows=num_rows,
        num_duplicates=num_rows - num_unique,
        num_measured=len(measured),
        num_dropped=len(measured) - len(short_prompts),
        prompt_key=columns.prompt,
        label_key=columns.label,
        num_demonstrations=sum(file.num_demonstrations for file in files)
        if is_large
        else sum(prompt.demonstration is not None for prompt in short_prompts),
        **percentiles(lengths, "prompt_tokens"),
    )


def _sha256_over(files: Sequence[FileRows]) -> str:
    """Return the hash of the file; for several files, or for some rows, the hash of their hashes
    and of the selected rows."""
    hashes = [file.table.sha256 + file.part for file in files]
    if len(hashes) == 1 and not files[0].part:
        return hashes[0]
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def percentiles(ascending: list[int], what: str) -> dict[str, int]:
    """Return the nearest-rank percentiles and the maximum of at least one number, as `{what}_p50`
    and so on. The numbers are in ascending order."""
    ranks = {percent: max(0, -(-len(ascending) * percent // 100) - 1) for percent in (50, 90, 99)}
    return {
        **{f"{what}_p{percent}": ascending[rank] for percent, rank in ranks.items()},
        f"{what}_max": ascending[-1],
    }


REPORT_AFTER_S = 2.0
REPORT_EVERY_S = 10.0


class ProgressReporter:
    """Reports the progress of slow work; quick work reports nothing. Callers pass the number of
    rows that are done."""

    def __init__(
        self,
        report_progress: Callable[[str], None] | None,
        what: str,
        *,
        after_s: float = REPORT_AFTER_S,
        every_s: float = REPORT_EVERY_S,
    ) -> None:
        """Send lines such as `reading train.jsonl: 1,200,000 rows` to `report_progress`; `what` is
        the text before the colon."""
        self._report_progress = report_progress
        self._what = what
        self._every_s = every_s
        self._next_s = time.monotonic() + after_s

    def __call__(self, num_done: int) -> None:
        """Report `num_done` rows if a report is due."""
        now = time.monotonic()
        if self._report_progress is not None and now >= self._next_s:
            self._next_s = now + self._every_s
            self._report_progress(f"{self._what}: {num_done:,} rows")
