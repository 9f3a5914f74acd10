"""Prompts of files that are too large to tokenise at once: a row is read and tokenised on demand.
Only a few numbers per row stay in memory."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, overload

from milescli.core.errors import DataError
from milescli.core.types import Prompt
from milescli.data.prompt_encoder import PromptEncoder
from milescli.data.rows import BadRow, Columns, DataRow, RowForm, Scan, bad_rows_error, row_of
from milescli.data.tables import Table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRows:
    """The rows that a source takes of one file, after they were looked at."""

    table: Table
    form: RowForm
    columns: Columns
    scan: Scan
    start: int
    """Place of the first one in the file, counted from 0."""
    first_index: int
    """Added to each row's own index, so that rows of several files have each another."""
    source: str | None
    """The entry of `data.mix` that named it."""
    spelled: str
    """As a recipe names it: the path, and which rows."""

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.table.path

    @property
    def rows(self) -> str:
        """`[0:1000]`; empty where all are meant."""
        return self.spelled.removeprefix(str(self.path))

    def __len__(self) -> int:
        return self.scan.num_rows

    def different_labels(self, most: int) -> tuple[list[DataRow], int]:
        """The first row of each different label, at most so many of them, evenly spread; and how
        many labels there are."""
        import numpy as np

        _, firsts = np.unique(np.frombuffer(self.scan.label_hashes, np.int64), return_index=True)
        firsts.sort()
        return self.read([int(firsts[n]) for n in evenly(len(firsts), most)]), len(firsts)

    def read(self, places: Sequence[int]) -> list[DataRow]:
        """Rows by their places among these, with their index in the file. Raises DataError where
        the file has changed."""
        rows = [
            row_of(record, self.columns, self.form)
            for record in self.table.fetch([self.start + place for place in places])
        ]
        bad = [row for row in rows if isinstance(row, BadRow)]
        if bad:  # the rows were good, and nobody may have written to them since
            raise bad_rows_error(f"{self.path} changed while it was read", self.path, bad)
        return [row for row in rows if isinstance(row, DataRow)]


class MappedPrompts(Sequence[Prompt]):
    """Prompts in file order, made when they are asked for; too long ones are there, too."""

    def __init__(
        self,
        files: Sequence[FileRows],
        *,
        tokenizer: PromptEncoder,
        kept: Sequence[int] | None = None,
    ) -> None:
        """`kept`: places over all files, where not all rows are taken."""
        self._files = files
        self._tokenizer = tokenizer
        self._kept = range(sum(map(len, files))) if kept is None else kept

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        if isinstance(place, slice):
            return self.make(range(*place.indices(len(self))))
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return self.make([place % len(self)])[0]

    def make(self, places: Sequence[int]) -> list[Prompt]:
        """Read and tokenise some, in this order. Raises DataError as `encode_rows`, and where a
        file has changed."""
        made: dict[int, Prompt] = {}
        for file, mine, rows in read_places(self._files, [self._kept[place] for place in places]):
            made.update(zip(mine, make_prompts(rows, self._tokenizer, file=file), strict=True))
        return [made[self._kept[place]] for place in places]

    def texts(self, places: Sequence[int]) -> list[tuple[int, str]]:
        """(index, what the user wrote last) of some, ascending, without tokens."""
        chosen = [self._kept[place] for place in places]
        return [
            (file.first_index + row.index, text_of(row, self._tokenizer))
            for file, _, rows in read_places(self._files, chosen)
            for row in rows
        ]


def read_places(
    files: Sequence[FileRows], places: Sequence[int]
) -> Iterator[tuple[FileRows, list[int], list[DataRow]]]:
    """Of each file that has some of the places over all files: those, and their rows."""
    ends = list(accumulate(len(file) for file in files))
    for file, (begin, end) in zip(files, pairwise([0, *ends]), strict=True):
        mine = [place for place in places if begin <= place < end]
        if mine:
            yield file, mine, file.read([place - begin for place in mine])


def evenly(count: int, most: int) -> Sequence[int]:
    """At most so many of the places 0 .. count - 1, evenly spread."""
    return range(count) if count <= most else [place * count // most for place in range(most)]


def first_places(files: Sequence[FileRows]) -> array[int]:
    """Places over all files of the rows whose prompt no earlier row has."""
    import numpy as np

    _, firsts = np.unique(prompt_hashes(files), return_index=True)
    firsts.sort()
    return array("q", firsts.astype(np.int64).tobytes())


def prompt_hashes(files: Sequence[FileRows]) -> NDArray[np.int64]:
    """[rows of all files] equal for equal prompts."""
    import numpy as np

    return np.concatenate([np.frombuffer(file.scan.prompt_hashes, np.int64) for file in files])


def by_file(
    prompts: Sequence[Prompt], files: Sequence[FileRows]
) -> list[tuple[FileRows, list[Prompt]]]:
    """The prompts of each file that has some, with their index in it."""
    firsts = [file.first_index for file in files]
    parts: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        number = bisect_right(firsts, prompt.index) - 1
        own = replace(prompt, index=prompt.index - firsts[number]) if firsts[number] else prompt
        parts.setdefault(number, []).append(own)
    return [(files[number], own) for number, own in sorted(parts.items())]


def row_named(index: int, files: Sequence[FileRows]) -> str:
    """`row 3 of train.jsonl`: where the prompt with this index stands."""
    number = bisect_right([file.first_index for file in files], index) - 1
    return f"row {index - files[number].first_index + 1} of {files[number].path}"


def make_prompts(
    rows: Sequence[DataRow], tokenizer: PromptEncoder, *, file: FileRows
) -> list[Prompt]:
    """Rows of one file, tokenised."""
    token_ids = encode_rows(rows, tokenizer, path=file.path, most=file.form.max_tokens)
    return [
        Prompt(
            index=file.first_index + row.index,
            token_ids=ids,
            text=text_of(row, tokenizer),
            label=row.label,
            demonstration=row.demonstration,
            source=file.source,
            turns=() if _is_text(row) else row.messages,
            tools=row.tools,
        )
        for row, ids in zip(rows, token_ids, strict=True)
    ]


def encode_rows(
    rows: Sequence[DataRow], tokenizer: PromptEncoder, *, path: Path, most: int | None = None
) -> list[list[int]]:
    """[num_rows][num_tokens], of a row with more than `most` no fewer than one more. Raises
    DataError with the row that the chat template refuses, and with one whose tokens the tokenizer
    does not have."""
    chats = [row for row in rows if row.messages]
    if asking := next((row for row in chats if row.tools), None):
        _require_told(asking, tokenizer, path=path)
    made = iter(_encode_chats(chats, tokenizer, path=path, most=most))
    encoded = [next(made) if row.messages else list(row.token_ids) for row in rows]
    for row in rows if len(chats) < len(rows) else ():
        if not row.messages and max(row.token_ids) >= tokenizer.vocab_size:
            raise DataError(
                f"row {row.index + 1} of {path} holds a token that the model does not have",
                why=f"token {max(row.token_ids)}; its tokenizer has {tokenizer.vocab_size}",
                fix=f"make the tokens of {path} anew, with the tokenizer in {tokenizer.folder}",
            )
    return encoded


def text_of(row: DataRow, tokenizer: PromptEncoder) -> str:
    """What the user wrote last; of a row of tokens, all of them as text."""
    return row.text if row.messages else tokenizer.decode(row.token_ids)


def _is_text(row: DataRow) -> bool:
    """The prompt is a text of the user, and nothing else."""
    return len(row.messages) == 1 and row.messages[0] == {"role": "user", "content": row.text}


def _require_told(row: DataRow, tokenizer: PromptEncoder, *, path: Path) -> None:
    """Raises DataError where the chat template passes over the tools of a row."""
    try:
        is_told = tokenizer.render(row.messages, tools=row.tools) != tokenizer.render(row.messages)
    except Exception:  # told with the row, by who renders all of them
        return
    if not is_told:
        raise DataError(
            f"the model would not be told of the tools in {path}",
            why=f"row {row.index + 1} has {len(row.tools)}, and the chat template writes none",
            fix=[
                "--set data.chat_template=FILE   # one that writes tools",
                f"remove the column `tools` of {path}",
            ],
        )


def _encode_chats(
    rows: Sequence[DataRow], tokenizer: PromptEncoder, *, path: Path, most: int | None
) -> list[list[int]]:
    try:
        return tokenizer.encode_chats(
            [row.messages for row in rows], tools=[row.tools for row in rows], most=most
        )
    except Exception as error:  # a chat template may raise anything, e.g. about the order of roles
        for row in rows:
            try:
                tokenizer.encode_chats([row.messages], tools=[row.tools], most=most)
            except Exception as cause:
                raise DataError(
                    f"the chat template refuses row {row.index + 1} of {path}",
                    why=f"{type(cause).__name__}: {cause}; its roles are "
                    f"{', '.join(message['role'] for message in row.messages)}",
                    fix=f"mend row {row.index + 1} of {path}",
                ) from cause
        raise AssertionError("a batch of chats failed, and none of them alone") from error
