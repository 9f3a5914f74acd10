"""Loads prompts: finds data files, reads and checks their rows, and tokenises the prompts. Small
files are tokenised at once; prompts of larger ones are tokenised on demand (`mapped_prompts`)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from milescli.core.errors import DataError
from milescli.core.types import Prompt
from milescli.data.epoch_order import epoch_order
from milescli.data.file_prompts import FilePrompts
from milescli.data.mapped_prompts import (
    FileRows,
    MappedPrompts,
    by_file,
    evenly,
    first_places,
    make_prompts,
)
from milescli.data.prompt_encoder import PromptEncoder, told_length
from milescli.data.rows import (
    MAX_BAD_ROWS,
    NUM_BAD_ROWS_SHOWN,
    PathField,
    RowForm,
    require_good,
    scan_rows,
)
from milescli.data.tables import check_file, open_table
from milescli.data.tasks import is_task, write_task
from milescli.recipe.data import Data
from milescli.recipe.data_files import DataFile, names_in, parse_data_file

__all__ = ["FilePrompts", "SourceReport", "check_file", "epoch_order", "load_source"]

TASK_FOLDER = "tasks"
"""Below `base_dir`: where the files of `task:NAME` go."""
LARGE_ROWS = 100_000
LARGE_BYTES = 256 * 2**20
"""Prompts of files with more rows, or more bytes, are tokenised on demand."""
CHUNK_ROWS = 4096
"""Tokenised at once."""
NUM_MEASURED = 4096
"""Rows of large files whose tokens are counted at the start, evenly spread."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """What is in the file; for the manifest and for people."""

    path: str
    sha256: str
    """SHA-256 of the file's bytes."""
    num_rows: int
    """Rows in the file."""
    num_duplicates: int
    """Rows left out by `data.dedup`."""
    num_measured: int
    """Rows whose tokens were counted: all, or some evenly spread ones of a large file."""
    num_dropped: int
    """Of those, the ones whose prompt is longer than `data.max_prompt_tokens`."""
    prompt_key: str
    label_key: str | None
    num_demonstrations: int
    """Rows that have a worked response; of a small file, kept ones."""
    prompt_tokens_p50: int
    """Over all measured rows, dropped ones included."""
    prompt_tokens_p90: int
    prompt_tokens_p99: int
    prompt_tokens_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A source, and what is in it."""

    source: FilePrompts
    report: SourceReport
    lengths: list[int]
    """Tokens of each measured prompt, ascending."""
    long_rows: list[int]
    """The first measured rows that are longer than `data.max_prompt_tokens`, counted from 1 over
    all files."""


def load_source(
    data: Data,
    path_field: PathField,
    *,
    tokenizer: PromptEncoder,
    seed: int,
    base_dir: str | Path,
    needs_label: bool | None = True,
    say: Say | None = None,
) -> tuple[FilePrompts, SourceReport]:
    """Read and check `data.<path_field>`, and tokenise it where it is small; relative paths start
    at `base_dir`, where `task:NAME` is written too.

    `needs_label`: whether the reward compares with a label (the built-in ones do); `say` is given
    lines on how far it is, where that takes seconds. Raises DataError for a file that is missing or
    of another kind, for bad rows, and where long prompts leave nothing.
    """
    loaded = load_part(
        data,
        path_field,
        tokenizer=tokenizer,
        seed=seed,
        base_dir=base_dir,
        needs_label=needs_label,
        say=say,
    )
    return loaded.source, loaded.report


def load_part(
    data: Data,
    path_field: PathField,
    *,
    tokenizer: PromptEncoder,
    seed: int,
    base_dir: str | Path,
    needs_label: bool | None,
    say: Say | None,
    name: str | None = None,
    first_index: int = 0,
) -> Loaded:
    """The same of what may be one of several sources: its `name` in the mix, and the index that its
    first row gets."""
    form = RowForm(
        field=path_field,
        prompt_key=data.prompt_key,
        label_key=data.label_key,
        system_prompt=data.system_prompt,
        needs_label=needs_label,
        max_tokens=data.max_prompt_tokens,
    )
    named = _locate(data, path_field, base_dir=Path(base_dir), seed=seed)
    files = _look_at(named, form, say=say, source=name, first_index=first_index)
    is_large = any(file.scan.rows is None for file in files)
    dedup = data.dedup == "exact" and path_field == "prompts"
    places: Sequence[int] = first_places(files) if dedup else range(sum(map(len, files)))
    num_unique, prompts = len(places), list[Prompt]()
    if is_large:
        for file in files:
            file.table.keep(file.columns.names, folder=Path(base_dir))
        prompts = MappedPrompts(files, tokenizer=tokenizer, kept=places)
        measured = prompts.make(evenly(len(prompts), NUM_MEASURED))
        short = _short_ones(measured, data=data, files=files)
    else:
        prompts = _tokenise(files, tokenizer, say=say)
        prompts = measured = [prompts[place] for place in places]
        short = _short_ones(measured, data=data, files=files)
        prompts, places = [prompts[at] for at in short], [places[at] for at in short]
    source = FilePrompts(
        prompts,
        seed=seed,
        shuffle=data.shuffle,
        max_tokens=data.max_prompt_tokens,
        refuses_long=data.long_prompts == "error",
        files=files,
        places=places,
    )
    kept = [measured[at] for at in short]
    report = _report(files, measured, kept, num_unique=num_unique, is_large=is_large)
    long = [p.index + 1 for p in measured if len(p.token_ids) > data.max_prompt_tokens]
    return Loaded(
        source=source,
        report=report,
        lengths=sorted(len(prompt.token_ids) for prompt in measured),
        long_rows=long[:MAX_BAD_ROWS],
    )


def file_named(text: str, *, key: str, folder: str | Path = "") -> DataFile:
    """What a recipe names; the name of a file that exists is taken as it stands, whatever brackets
    are in it."""
    if (Path(folder) / Path(text).expanduser()).exists():
        return DataFile(name=text)
    return parse_data_file(text, key=key)


def _locate(data: Data, path_field: PathField, *, base_dir: Path, seed: int) -> list[DataFile]:
    """Each with an absolute path."""
    key = f"data.{path_field}"
    located = []
    for name in names_in(getattr(data, path_field)):
        file = file_named(name, key=key, folder=base_dir)
        if is_task(file.name):
            path = write_task(file.name, base_dir / TASK_FOLDER, seed)
        else:
            path = base_dir / Path(file.name).expanduser()
            check_file(path, field=path_field)
        located.append(replace(file, name=str(path)))
    if not located:
        raise DataError(
            f"`{key}` is not set",
            why="there is nothing to read prompts from",
            fix=f"--set {key}=FILE.jsonl",
        )
    return located


def _look_at(
    named: Sequence[DataFile],
    form: RowForm,
    *,
    say: Say | None,
    source: str | None,
    first_index: int,
) -> list[FileRows]:
    """Each row is looked at once, and kept where there are few. Raises DataError for bad ones."""
    files: list[FileRows] = []
    left = LARGE_ROWS
    tables = [open_table(Path(file.name)) for file in named]
    if sum(table.size_bytes for table in tables) > LARGE_BYTES:
        left = 0
    for file, table in zip(named, tables, strict=True):
        tick = Waiting(say, f"reading {file.spelled()}")
        scan = scan_rows(table, form, start=file.start, stop=file.stop, most=left, tick=tick)
        if file.start and not scan.num_rows:
            raise DataError(
                f"{table.path} has no row {file.start}",
                why=f"`{file.rows}` begins behind its end",
                fix=f"--set data.{form.field}={file.name}",
            )
        columns = require_good(scan, table.path, field=form.field)
        rows = FileRows(
            table=table,
            form=form,
            columns=columns,
            scan=scan,
            start=file.start,
            first_index=first_index,
            source=source,
            spelled=file.spelled(),
        )
        files.append(rows)
        left = max(0, left - len(rows)) if scan.rows is not None else 0
        first_index += scan.last_line
    return files


def _tokenise(
    files: Sequence[FileRows], tokenizer: PromptEncoder, *, say: Say | None
) -> list[Prompt]:
    prompts: list[Prompt] = []
    tick = Waiting(say, "making tokens of " + ", ".join(file.spelled for file in files))
    for file in files:
        rows = file.scan.rows or []
        for start in range(0, len(rows), CHUNK_ROWS):
            prompts += make_prompts(rows[start : start + CHUNK_ROWS], tokenizer, file=file)
            tick(len(prompts))
        file.scan.rows = None  # the prompts have all that is needed of them
    return prompts


def _short_ones(prompts: Sequence[Prompt], *, data: Data, files: Sequence[FileRows]) -> list[int]:
    """Places of those that are not too long. Raises DataError where there is none, or where the
    recipe lets no long one pass."""
    bound = data.max_prompt_tokens
    kept = [place for place, prompt in enumerate(prompts) if len(prompt.token_ids) <= bound]
    if len(kept) == len(prompts) or (kept and data.long_prompts == "drop"):
        return kept
    long = [prompt for prompt in prompts if len(prompt.token_ids) > bound]
    (file, rows), *_ = by_file(long, files)
    shown = "; ".join(
        f"row {prompt.index + 1}: {told_length(prompt, bound)}"
        for prompt in rows[:NUM_BAD_ROWS_SHOWN]
    )
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    fixes = [f"--set data.max_prompt_tokens={len(longest.token_ids)}"]
    raise DataError(
        f"{len(long)} of {len(prompts)} prompts of {', '.join(file.spelled for file in files)} are "
        f"longer than {bound} tokens",
        why=f"{shown if len(files) == 1 else f'{file.path}: {shown}'}; the longest has "
        f"{told_length(longest, bound)}",
        fix=[*fixes, "--set data.long_prompts=drop"] if kept else fixes,
    )


def _report(
    files: Sequence[FileRows],
    measured: Sequence[Prompt],
    kept: Sequence[Prompt],
    *,
    num_unique: int,
    is_large: bool,
) -> SourceReport:
    lengths = sorted(len(prompt.token_ids) for prompt in measured)
    num_rows = sum(map(len, files))
    return SourceReport(
        path=", ".join(file.spelled for file in files),
        sha256=_sha256_over(files),
        num_rows=num_rows,
        num_duplicates=num_rows - num_unique,
        num_measured=len(measured),
        num_dropped=len(measured) - len(kept),
        prompt_key=files[0].columns.prompt,
        label_key=files[0].columns.label,
        num_demonstrations=sum(file.scan.num_demonstrations for file in files)
        if is_large
        else sum(prompt.demonstration is not None for prompt in kept),
        prompt_tokens_p50=percentile(lengths, 50),
        prompt_tokens_p90=percentile(lengths, 90),
        prompt_tokens_p99=percentile(lengths, 99),
        prompt_tokens_max=lengths[-1],
    )


def _sha256_over(files: Sequence[FileRows]) -> str:
    """The file's; of several, or of some rows, the hash of their hashes and which rows."""
    hashes = [file.table.sha256 + file.rows for file in files]
    if len(hashes) == 1 and not files[0].rows:
        return hashes[0]
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def percentile(ascending: list[int], percent: int) -> int:
    """Nearest-rank percentile of numbers in ascending order, at least one."""
    return ascending[max(0, -(-len(ascending) * percent // 100) - 1)]


SAY_AFTER_S = 2.0
SAY_EVERY_S = 10.0


class Waiting:
    """Reports the progress of slow work; quick work reports nothing. Callers pass the number of
    rows that are done."""

    def __init__(
        self,
        say: Callable[[str], None] | None,
        what: str,
        *,
        after_s: float = SAY_AFTER_S,
        every_s: float = SAY_EVERY_S,
    ) -> None:
        """`say` is given lines such as `reading train.jsonl: 1,200,000 rows`; `what` is the text
        before the colon."""
        self._say = say
        self._what = what
        self._every_s = every_s
        self._next_s = time.monotonic() + after_s

    def __call__(self, num_done: int) -> None:
        """Report `num_done` rows if a report is due."""
        now = time.monotonic()
        if self._say is not None and now >= self._next_s:
            self._next_s = now + self._every_s
            self._say(f"{self._what}: {num_done:,} rows")
