"""The prompts of data files, in an order that (seed, epoch) fixes. Prompts of small files are in
memory; those of large files are made from their rows on demand. `prompt_source` loads them."""

from __future__ import annotations

import hashlib
import shlex
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, overload

from milescli.core.errors import DataError
from milescli.core.types import Image, ImageSpan, Prompt
from milescli.data.file_rows import FileRows, describe_row, evenly_spread_places, read_places
from milescli.data.images import PromptImages, Source, as_parts
from milescli.data.prompt_encoder import Message, PromptEncoder
from milescli.data.rows import DataRow
from milescli.data.tokenizer import format_num_tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHUNK_PROMPTS = 1024
"""Prompts that are tokenised at once."""
LARGE_ORDER = 100_000
"""With more rows, numpy makes the order, by another hash."""


class OrderedPrompts:
    """Yields prompts in a fixed order without end. The position is its whole state."""

    def __init__(self) -> None:
        self.position = 0
        """Rows taken since the start of the run, over all epochs."""

    def at(self, positions: Sequence[int]) -> list[tuple[int, Prompt | None]]:
        """Return (epoch, prompt) at each position, None in place of a prompt that is too long. Does
        not change the position."""
        raise NotImplementedError

    def no_short_prompt_error(self) -> DataError:
        """Return the error that every prompt is too long."""
        raise NotImplementedError

    @property
    def rows_per_pass(self) -> int:
        """Return a number of consecutive positions in which every prompt occurs."""
        raise NotImplementedError

    def seek(self, position: int) -> None:
        """Go to a saved position."""
        assert position >= 0, position
        self.position = position

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """Return the next `count` prompts, each with its epoch, and move the position. May cross
        several epochs. Raises DataError if no prompt of a whole epoch is short enough, and if a
        large file has changed."""
        taken: list[tuple[int, Prompt]] = []
        num_tried = 0
        while len(taken) < count:
            positions = range(self.position, self.position + count - len(taken))
            rows = self.at(positions)
            taken += [(epoch, prompt) for epoch, prompt in rows if prompt is not None]
            num_tried += len(positions)
            self.position = positions.stop
            if not taken and num_tried > self.rows_per_pass:
                raise self.no_short_prompt_error()
        return taken


class FilePrompts(OrderedPrompts):
    """Yields the prompts of files, epoch by epoch, each in another order. For small files it holds
    only the prompts that are short enough. For large files it holds all: a prompt that is too long
    is skipped at its position, which counts."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        max_tokens: int | None = None,
        refuses_long: bool = False,
        files: Sequence[FileRows] = (),
        places: Sequence[int] | None = None,
    ) -> None:
        """Take `prompts` in file order, at least one. `max_tokens`: longer ones are skipped, or are
        an error if the source `refuses_long`. `files`: of the prompts; `places`: the row of each
        prompt, counted over all files, if some rows are left out."""
        assert prompts, "a source without prompts"
        super().__init__()
        self.prompts = prompts
        """In file order. Prompts of large files are made at each access, too long ones too."""
        self.files = files
        self.num_skipped = 0
        """Prompts passed over in this process because they are too long."""
        self._places = range(len(prompts)) if places is None else places
        self._order = EpochOrder(len(prompts), seed=seed, shuffle=shuffle)
        self._max_tokens = sys.maxsize if max_tokens is None else max_tokens
        self._refuses_long = refuses_long

    def __len__(self) -> int:
        """Return the number of rows of an epoch."""
        return len(self.prompts)

    @property
    def rows_per_pass(self) -> int:
        """Return the number of rows of an epoch."""
        return len(self)

    @property
    def is_large(self) -> bool:
        """Return True if prompts are tokenised on demand."""
        return isinstance(self.prompts, StoredPrompts)

    def first(self, count: int | None = None) -> list[Prompt]:
        """Return the first `count` prompts in file order that are short enough; None: all."""
        return [prompt for _, prompt in self.first_with_places(count)]

    def first_with_places(self, count: int | None) -> list[tuple[int, Prompt]]:
        """Return (row counted over all files, prompt) for the prompts of `first`."""
        short: list[tuple[int, Prompt]] = []
        for start in range(0, len(self), CHUNK_PROMPTS):
            if count is not None and len(short) >= count:
                break
            chunk = self.prompts[start : start + CHUNK_PROMPTS]
            short += [
                (self._places[start + offset], prompt)
                for offset, prompt in enumerate(chunk)
                if self._is_short(prompt)
            ]
        return short[:count]

    def texts(self, most: int) -> list[tuple[int, str]]:
        """Return (index, last message of the user) of at most `most` prompts, evenly spread."""
        places = evenly_spread_places(len(self), most)
        if isinstance(self.prompts, StoredPrompts):
            return self.prompts.texts(places)
        return [(self.prompts[place].index, self.prompts[place].text) for place in places]

    def evenly_spread(self, most: int) -> list[Prompt]:
        """Return all prompts that are short enough; for large files at most `most` of them, evenly
        spread."""
        if not isinstance(self.prompts, StoredPrompts):
            return list(self.prompts)
        return [
            p for p in self.prompts.make(evenly_spread_places(len(self), most)) if self._is_short(p)
        ]

    def at(self, positions: Sequence[int]) -> list[tuple[int, Prompt | None]]:
        """Return (epoch, prompt) at each position, None in place of a prompt that is too long."""
        places = [self._order.at(position) for position in positions]
        rows = [row for _, row in places]
        if isinstance(self.prompts, StoredPrompts):
            prompts = self.prompts.make(rows)
        else:
            prompts = [self.prompts[row] for row in rows]
        short = [prompt if self._is_short(prompt) else None for prompt in prompts]
        self.num_skipped += short.count(None)
        return [(epoch, prompt) for (epoch, _), prompt in zip(places, short, strict=True)]

    def no_short_prompt_error(self) -> DataError:
        """Return the error that every prompt is too long."""
        return self._too_long("every prompt", self.prompts[0])

    def _is_short(self, prompt: Prompt) -> bool:
        if len(prompt.token_ids) <= self._max_tokens:
            return True
        if self._refuses_long:
            raise self._too_long("a prompt", prompt)
        return False

    def _too_long(self, what: str, prompt: Prompt) -> DataError:
        return DataError(
            f"{what} is longer than {self._max_tokens} tokens",
            why=f"{describe_row(prompt.index, self.files)} has "
            f"{format_num_tokens(prompt, self._max_tokens)}",
            fix=f"--set data.max_prompt_tokens={len(prompt.token_ids)}",
        )


class StoredPrompts(Sequence[Prompt]):
    """Makes prompts from stored rows, in file order, too long ones included. Each access reads the
    row and tokenises it."""

    def __init__(
        self, files: Sequence[FileRows], tokenizer: PromptEncoder, places: Sequence[int]
    ) -> None:
        """Take the rows at `places`, counted over all files."""
        self._files = files
        self._tokenizer = tokenizer
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

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

    def make(
        self, places: Sequence[int], tick: Callable[[int], None] | None = None
    ) -> list[Prompt]:
        """Return the prompts at `places`, in this order. Raises DataError as `encode_rows`, and if
        a file has changed. `tick`: called now and then with the number of prompts made."""
        prompts: list[Prompt] = []
        for start in range(0, len(places), CHUNK_PROMPTS):
            wanted = [self._places[place] for place in places[start : start + CHUNK_PROMPTS]]
            made: dict[int, Prompt] = {}
            for file, mine, rows in read_places(self._files, wanted):
                made.update(zip(mine, make_prompts(rows, self._tokenizer, file=file), strict=True))
            prompts += [made[place] for place in wanted]
            if tick is not None:
                tick(len(prompts))
        return prompts

    def texts(self, places: Sequence[int]) -> list[tuple[int, str]]:
        """Return (index, last message of the user) of some prompts, ascending, without tokens."""
        wanted = [self._places[place] for place in places]
        return [
            (file.first_index + row.index, text_of(row, self._tokenizer))
            for file, _, rows in read_places(self._files, wanted)
            for row in rows
        ]


def make_prompts(
    rows: Sequence[DataRow], tokenizer: PromptEncoder, *, file: FileRows
) -> list[Prompt]:
    """Tokenise rows of one file."""
    token_ids = encode_rows(rows, tokenizer, path=file.path, most=file.form.max_tokens)
    shown = [
        _with_image_tokens(row, ids, file.form.images, file.path)
        for row, ids in zip(rows, token_ids, strict=True)
    ]
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
            images=images,
            image_spans=spans,
            worked_images=_read(row.worked_images, row, file.form.images, file.path),
        )
        for row, (ids, spans, images) in zip(rows, shown, strict=True)
    ]


def _with_image_tokens(
    row: DataRow, ids: list[int], image_encoder: PromptImages | None, path: Path
) -> tuple[list[int], Sequence[ImageSpan], Sequence[Image]]:
    """Return the tokens of a row with its image tokens expanded, the positions of its images, and
    the images. Raises DataError if an image has changed, or if image tokens and images do not
    match."""
    if image_encoder is None or not ids or (not row.images and image_encoder.token_id not in ids):
        return ids, (), ()
    images = _read(row.images, row, image_encoder, path)
    with _naming_row(row, path):
        expanded, spans, _ = image_encoder.expanded(ids, images)
    return expanded, spans, images


def _read(
    sources: Sequence[Source], row: DataRow, image_encoder: PromptImages | None, path: Path
) -> list[Image]:
    """Read images of a row. Raises DataError if one has changed."""
    with _naming_row(row, path):
        return (
            [image_encoder.read(source, base=path.parent) for source in sources]
            if image_encoder
            else []
        )


@contextmanager
def _naming_row(row: DataRow, path: Path) -> Iterator[None]:
    """Turn a ValueError about the images of a row into a DataError that names the row."""
    try:
        yield
    except ValueError as error:
        raise DataError(
            f"the images of row {row.index + 1} of {path} cannot be used",
            why=str(error),
            fix=f"miles data check {shlex.quote(f'{path}[{row.index}:{row.index + 1}]')}   "
            "# fix or remove the row",
        ) from error


def encode_rows(
    rows: Sequence[DataRow], tokenizer: PromptEncoder, *, path: Path, most: int | None = None
) -> list[list[int]]:
    """Return [num_rows][num_tokens]; a row with more than `most` tokens may be truncated to no
    fewer than `most` + 1. Raises DataError with the row that the chat template refuses, or whose
    tokens the tokenizer does not have."""
    chats = [row for row in rows if row.messages]
    if with_tools := next((row for row in chats if row.tools), None):
        _require_tools_rendered(with_tools, tokenizer, path=path)
    made = iter(_encode_chats(chats, tokenizer, path=path, most=most))
    encoded = [next(made) if row.messages else list(row.token_ids) for row in rows]
    for row in rows if len(chats) < len(rows) else ():
        if not row.messages and max(row.token_ids) >= tokenizer.vocab_size:
            raise DataError(
                f"row {row.index + 1} of {path} contains a token that the model does not have",
                why=f"it is token {max(row.token_ids)}, but the tokenizer has "
                f"{tokenizer.vocab_size}",
                fix=f"tokenize {path} again with the tokenizer in {tokenizer.folder}",
            )
    return encoded


def chat_of(row: DataRow) -> Sequence[Message]:
    """Return the messages in the form of chat templates: each image mark is a separate part."""
    return as_parts(row.messages) if row.images else row.messages


def text_of(row: DataRow, tokenizer: PromptEncoder) -> str:
    """Return the last message of the user; for a row of tokens, all of them as text."""
    return row.text if row.messages else tokenizer.decode(row.token_ids)


def _is_text(row: DataRow) -> bool:
    """Return True if the prompt consists of one message of the user."""
    return len(row.messages) == 1 and row.messages[0] == {"role": "user", "content": row.text}


def _require_tools_rendered(row: DataRow, tokenizer: PromptEncoder, *, path: Path) -> None:
    """Raise DataError if the chat template omits the tools of a row."""
    try:
        with_tools = tokenizer.render(row.messages, tools=row.tools)
        is_same = with_tools == tokenizer.render(row.messages)
    except Exception:  # `_encode_chats` reports it, with the row
        return
    if is_same:
        raise DataError(
            f"the chat template would not tell the model about the tools in {path}",
            why=f"row {row.index + 1} has {len(row.tools)}, but the chat template does not write "
            "tools",
            fix=[
                "--set data.chat_template=FILE   # a template that writes tools",
                f"remove the column `tools` of {path}",
            ],
        )


def _encode_chats(
    rows: Sequence[DataRow], tokenizer: PromptEncoder, *, path: Path, most: int | None
) -> list[list[int]]:
    try:
        return tokenizer.encode_chats(
            [chat_of(row) for row in rows],
            tools=[row.tools for row in rows],
            # a text that was cut may lack marks of its images
            most=None if any(row.images for row in rows) else most,
        )
    except Exception as error:  # a chat template may raise anything, e.g. about the order of roles
        for row in rows:
            try:
                tokenizer.encode_chats([chat_of(row)], tools=[row.tools], most=most)
            except DataError as cause:
                place = f"row {row.index + 1} of {path}"
                raise DataError(cause.what, why=f"{place}: {cause.why}", fix=cause.fixes) from None
            except Exception as cause:
                raise DataError(
                    f"the chat template rejects row {row.index + 1} of {path}",
                    why=f"{type(cause).__name__}: {cause}; its roles are "
                    f"{', '.join(message['role'] for message in row.messages)}",
                    fix=f"fix row {row.index + 1} of {path}",
                ) from cause
        raise AssertionError("a batch of chats failed, and none of them alone") from error


class EpochOrder:
    """Maps positions to rows, epoch by epoch."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        self._num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._epoch, self._rows = -1, array("q")

    def at(self, position: int) -> tuple[int, int]:
        """Return (epoch, row) at a position counted over all epochs."""
        epoch, offset = divmod(position, self._num_rows)
        if epoch != self._epoch:
            self._rows = epoch_order(
                self._num_rows, seed=self._seed, epoch=epoch, shuffle=self._shuffle
            )
            self._epoch = epoch
        return epoch, self._rows[offset]


def epoch_order(num_prompts: int, *, seed: int, epoch: int, shuffle: bool) -> array[int]:
    """Return [num_prompts] rows as a permutation that depends only on the arguments, so that it is
    equal on every machine: rows sorted by a hash of (seed, epoch, row). The hash is BLAKE2b; above
    LARGE_ORDER rows it is SplitMix64 (Steele et al., OOPSLA 2014) of the row, from a start that is
    the BLAKE2b hash of (seed, epoch)."""
    if not shuffle:
        return array("q", range(num_prompts))
    key = f"{seed}/{epoch}".encode()
    if num_prompts > LARGE_ORDER:
        return _large_order(num_prompts, key)
    ranks = [
        hashlib.blake2b(row.to_bytes(8, "little"), key=key, digest_size=16).digest()
        for row in range(num_prompts)
    ]
    return array("q", sorted(range(num_prompts), key=ranks.__getitem__))


def _large_order(num_prompts: int, key: bytes) -> array[int]:
    import numpy as np

    order = array("q")
    ranks = random_bits(num_prompts, key)
    order.frombytes(np.argsort(ranks, kind="stable").astype(np.int64).tobytes())
    return order


def random_bits(count: int, key: bytes) -> NDArray[np.uint64]:
    """Return [count] numbers of 64 random bits, by SplitMix64."""
    import numpy as np

    start = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    ranks = np.arange(1, count + 1, dtype=np.uint64)
    ranks *= np.uint64(0x9E3779B97F4A7C15)
    ranks += np.uint64(start)
    ranks ^= ranks >> np.uint64(30)
    ranks *= np.uint64(0xBF58476D1CE4E5B9)
    ranks ^= ranks >> np.uint64(27)
    ranks *= np.uint64(0x94D049BB133111EB)
    ranks ^= ranks >> np.uint64(31)
    return ranks
