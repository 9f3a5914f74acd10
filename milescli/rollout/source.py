"""Prompts from a file, tokenised once, in an order fixed by (seed, epoch). Its position is its
whole state."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from pathlib import Path

from milescli.core.errors import DataError
from milescli.core.nearest import nearest
from milescli.core.types import Prompt
from milescli.recipe.data import Data
from milescli.rollout.rows import NUM_BAD_ROWS_SHOWN, DataRow, PathField, read_rows, sha256_of
from milescli.rollout.tasks import is_task, write_task
from milescli.rollout.tokenizer import ChatTokenizer

TASK_FOLDER = "tasks"
"""Below `base_dir`: where the files of `task:NAME` go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """What is in the file; for the manifest and for people."""

    path: str
    sha256: str
    """Of the file's bytes."""
    num_rows: int
    """Rows in the file."""
    num_dropped: int
    """Rows whose prompt is longer than `data.max_prompt_tokens`."""
    prompt_key: str
    label_key: str | None
    num_demonstrations: int
    """Kept rows that have a worked response."""
    prompt_tokens_p50: int
    """Over all rows, dropped ones included."""
    prompt_tokens_p90: int
    prompt_tokens_p99: int
    prompt_tokens_max: int


class FilePrompts:
    """A PromptSource over the kept rows of one file. Endless: an epoch is followed by the next, in
    another order."""

    def __init__(self, prompts: list[Prompt], *, seed: int, shuffle: bool) -> None:
        """`prompts` in file order, at least one."""
        assert prompts, "a source without prompts"
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._epoch = -1
        self._order: array[int] = array("q")

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._prompts)

    @property
    def position(self) -> int:
        """Prompts taken since the start of the run, over all epochs."""
        return self._position

    @property
    def prompts(self) -> list[Prompt]:
        """All kept prompts in file order (evaluation, demonstrations)."""
        return self._prompts

    def seek(self, position: int) -> None:
        """Go to a position that was saved."""
        assert position >= 0, position
        self._position = position

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next `count` prompts, each with its epoch; moves the position. May cross epochs, more
        than once."""
        taken = []
        for position in range(self._position, self._position + count):
            epoch, offset = divmod(position, len(self._prompts))
            taken.append((epoch, self._prompts[self._order_of(epoch)[offset]]))
        self._position += count
        return taken

    def _order_of(self, epoch: int) -> array[int]:
        if epoch != self._epoch:
            self._order = epoch_order(
                len(self._prompts), seed=self._seed, epoch=epoch, shuffle=self._shuffle
            )
            self._epoch = epoch
        return self._order


def epoch_order(num_prompts: int, *, seed: int, epoch: int, shuffle: bool) -> array[int]:
    """[num_prompts] a permutation that depends on nothing but its arguments: rows sorted by a hash
    of (seed, epoch, row)."""
    if not shuffle:
        return array("q", range(num_prompts))
    key = f"{seed}/{epoch}".encode()
    ranks = [
        hashlib.blake2b(row.to_bytes(8, "little"), key=key, digest_size=16).digest()
        for row in range(num_prompts)
    ]
    return array("q", sorted(range(num_prompts), key=ranks.__getitem__))


def load_source(
    data: Data,
    path_field: PathField,
    *,
    tokenizer: ChatTokenizer,
    seed: int,
    base_dir: str | Path,
    needs_label: bool = True,
) -> tuple[FilePrompts, SourceReport]:
    """Read, check and tokenise `data.<path_field>`; relative paths start at `base_dir`, where
    `task:NAME` is written too.

    `needs_label`: whether the reward compares with a label (the built-in ones do). Raises DataError
    for a file that is missing or of another kind, for bad rows, and where long prompts leave
    nothing.
    """
    path = _locate(data, path_field, base_dir=Path(base_dir), seed=seed)
    columns, rows = read_rows(
        path,
        field=path_field,
        prompt_key=data.prompt_key,
        label_key=data.label_key,
        system_prompt=data.system_prompt,
        needs_label=needs_label,
    )
    token_ids = _tokenise(rows, tokenizer, path=path)
    kept = [
        (row, ids)
        for row, ids in zip(rows, token_ids, strict=True)
        if len(ids) <= data.max_prompt_tokens
    ]
    lengths = sorted(len(ids) for ids in token_ids)
    _check_lengths(rows, token_ids, data=data, path=path, num_kept=len(kept), longest=lengths[-1])
    prompts = [
        Prompt(
            index=row.index,
            token_ids=ids,
            text=row.text,
            label=row.label,
            demonstration=row.demonstration,
        )
        for row, ids in kept
    ]
    report = SourceReport(
        path=str(path),
        sha256=sha256_of(path),
        num_rows=len(rows),
        num_dropped=len(rows) - len(kept),
        prompt_key=columns.prompt,
        label_key=columns.label,
        num_demonstrations=sum(prompt.demonstration is not None for prompt in prompts),
        prompt_tokens_p50=percentile(lengths, 50),
        prompt_tokens_p90=percentile(lengths, 90),
        prompt_tokens_p99=percentile(lengths, 99),
        prompt_tokens_max=lengths[-1],
    )
    return FilePrompts(prompts, seed=seed, shuffle=data.shuffle), report


def _locate(data: Data, path_field: PathField, *, base_dir: Path, seed: int) -> Path:
    value = getattr(data, path_field)
    if value is None:
        raise DataError(
            f"`data.{path_field}` is not set",
            why="there is nothing to read prompts from",
            fix=f"--set data.{path_field}=FILE.jsonl",
        )
    if is_task(value):
        return write_task(value, base_dir / TASK_FOLDER, seed)
    path = Path(value).expanduser()
    path = path if path.is_absolute() else base_dir / path
    check_file(path, field=path_field)
    return path


def check_file(path: Path, *, field: PathField) -> None:
    """Raises DataError where `path` is not a .jsonl or .parquet file that can be opened."""
    if path.is_dir():
        inside = sorted(
            item.name for item in path.iterdir() if item.suffix in (".jsonl", ".parquet")
        )
        guess = path / (inside[0] if inside else "FILE.jsonl")
        raise DataError(
            f"{path} is a folder", why="a single file is wanted", fix=f"--set data.{field}={guess}"
        )
    if not path.exists():
        siblings = (
            sorted(item.name for item in path.parent.iterdir()) if path.parent.is_dir() else []
        )
        guess = nearest(path.name, siblings)
        where = (
            f"{path.parent} holds {', '.join(siblings[:8]) or 'nothing'}"
            if path.parent.is_dir()
            else f"there is no folder {path.parent}"
        )
        raise DataError(
            f"there is no file {path}",
            why=where,
            fix=f"--set data.{field}={path.parent / (guess or 'FILE.jsonl')}",
        )
    head = _head(path)
    if head.startswith(b"\x1f\x8b"):
        raise DataError(f"{path} is compressed", why="it is a gzip file", fix=f"gunzip -k {path}")
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(
            f"{path} is neither .jsonl nor .parquet",
            why=f"its suffix is {path.suffix or 'missing'}, and the format is known by it",
            fix=f"jq -c '.[]' {path} > {path.with_suffix('.jsonl')}"
            if path.suffix == ".json"
            else f"mv {path} {path.with_suffix('.jsonl')}",
        )
    if path.suffix == ".jsonl" and head.startswith(b"PAR1"):
        raise DataError(
            f"{path} is not JSONL",
            why="it is a parquet file",
            fix=f"mv {path} {path.with_suffix('.parquet')}",
        )


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise DataError(
            f"cannot open {path}", why=str(error.strerror or error), fix=f"ls -l {path}"
        ) from error


def _tokenise(rows: list[DataRow], tokenizer: ChatTokenizer, *, path: Path) -> list[list[int]]:
    try:
        return tokenizer.encode_chats([row.messages for row in rows])
    except Exception as error:  # a chat template may raise anything, e.g. about the order of roles
        for row in rows:
            try:
                tokenizer.encode_chat(row.messages)
            except Exception as cause:
                raise DataError(
                    f"the chat template refuses row {row.index + 1} of {path}",
                    why=f"{type(cause).__name__}: {cause}; its roles are "
                    f"{', '.join(message['role'] for message in row.messages)}",
                    fix=f"mend row {row.index + 1} of {path}",
                ) from cause
        raise AssertionError("a batch of chats failed, and none of them alone") from error


def _check_lengths(
    rows: list[DataRow],
    token_ids: list[list[int]],
    *,
    data: Data,
    path: Path,
    num_kept: int,
    longest: int,
) -> None:
    if num_kept == len(rows) or (num_kept and data.long_prompts == "drop"):
        return
    bound = data.max_prompt_tokens
    long = [
        f"row {row.index + 1}: {len(ids)}"
        for row, ids in zip(rows, token_ids, strict=True)
        if len(ids) > bound
    ]
    fixes = [f"--set data.max_prompt_tokens={longest}"]
    raise DataError(
        f"{len(long)} of {len(rows)} prompts of {path} are longer than {bound} tokens",
        why=f"{'; '.join(long[:NUM_BAD_ROWS_SHOWN])}; the longest has {longest}",
        fix=[*fixes, "--set data.long_prompts=drop"] if num_kept else fixes,
    )


def percentile(ascending: list[int], percent: int) -> int:
    """Of numbers in ascending order, at least one; nearest rank."""
    return ascending[max(0, -(-len(ascending) * percent // 100) - 1)]
