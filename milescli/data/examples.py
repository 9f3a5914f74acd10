"""Loads and tokenises the rows of `data.train` and `data.validation`: chats with their loss masks,
or pairs. Bad rows are reported by line; order and position are defined as for prompts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from milescli.core.errors import DataError
from milescli.core.types import Pair, Trajectory
from milescli.core.units import format_few
from milescli.data.chat_masks import (
    MarkedText,
    mark_chat,
    mark_chat_as_one,
    mark_response,
    mark_text,
    require_no_stop,
    tokenize_marked,
    truncated,
    with_image_tokens,
)
from milescli.data.example_rows import Chat, ExampleRow, ExampleRowParser, Kind, RowField
from milescli.data.file_prompts import EpochOrder
from milescli.data.file_rows import FileRows, read_file
from milescli.data.images import PromptImages, as_parts
from milescli.data.prompt_source import parse_file_name, percentiles
from milescli.data.rows import NUM_BAD_ROWS_SHOWN, BadRow, bad_rows_error
from milescli.data.tables import LINE_SUFFIXES, Table, check_file
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.data import Data
from milescli.recipe.data_files import DataFile, names_in

Item = TypeVar("Item")
"""Trajectory or Pair."""
NUM_CHECKED_ROWS = 2_000
"""Rows of a file whose texts are searched for special tokens."""


class Place(NamedTuple):
    """Identifies the row of a sequence; equal for all sequences of one row."""

    file: int
    """Number among the files that the recipe names; one that is named twice is two."""
    text: str
    """Its name in messages: `line 3`, with its file if there are several."""


Reasons = dict[int, str]
"""Number of a row among all rows -> why it is left out."""


class Examples(Generic[Item]):
    """Yields rows in an order that (seed, epoch) determines. The position is the whole state."""

    def __init__(self, items: Sequence[Item], *, seed: int, shuffle: bool) -> None:
        """Take `items` in file order, at least one."""
        assert items, "a source without rows"
        self.items = items
        self._order = EpochOrder(len(items), seed=seed, shuffle=shuffle)
        self.position = 0
        """Rows taken since the start of the run, over all epochs."""

    def __len__(self) -> int:
        """Return the number of rows of an epoch."""
        return len(self.items)

    def first(self, count: int) -> list[Item]:
        """Return the rows at the first `count` positions of a run, without repetitions."""
        if count >= len(self.items):
            return list(self.items)
        return self._at(range(count))

    def take(self, count: int) -> list[Item]:
        """Return the next `count` rows and move the position. May cross epochs."""
        start, self.position = self.position, self.position + count
        return self._at(range(start, self.position))

    def _at(self, positions: Sequence[int]) -> list[Item]:
        return [self.items[self._order.at(position)[1]] for position in positions]


def load_examples(
    data: Data,
    key: RowField,
    *,
    kind: Kind,
    tokenizer: ChatTokenizer,
    folder: Path | None = None,
) -> tuple[list[Trajectory] | list[Pair], ExampleReport]:
    """Read, check and tokenise what `data.<key>` names, by absolute paths. `folder`: where Arrow
    files are written; None: in the folder for temporary files. Raises DataError for a file that is
    missing or of another kind, for bad rows, and if no row is left to train on."""
    named = [parse_file_name(name, key=f"data.{key}") for name in names_in(getattr(data, key))]
    pairs: list[Pair] = []
    places: list[Place] = []
    hashes: list[str] = []
    spelled = ""
    shown = short_names([Path(file.name) for file in named])
    for number, file in enumerate(named):
        path = Path(file.name)
        read = read_examples(
            file, data=data, key=key, kind=kind, folder=folder, images=tokenizer.images
        )
        read.require_good()
        rows = read.read(range(len(read)))
        made = _tokenize_rows(rows, tokenizer, path=path, kind=kind, image_encoder=read.form.images)
        spelled = spelled or _special_token_in_text(rows, tokenizer, path=path)
        unit = "line" if path.suffix in LINE_SUFFIXES else "row"
        whose = f"{shown[number]} {unit}" if named[1:] else unit
        places += [Place(number, f"{whose} {pair.index + 1}") for pair in made]
        pairs += [replace(pair, index=len(pairs) + at) for at, pair in enumerate(made)]
        hashes.append(read.table.sha256 + file.rows)
    several = len(named) > 1 or bool(named[0].rows)
    sha256 = hashlib.sha256("\n".join(hashes).encode()).hexdigest() if several else hashes[0]
    usable, report = select_usable(
        pairs,
        data=data,
        key=key,
        places=places,
        path=", ".join(file.spelled() for file in named),
        sha256=sha256,
    )
    report = replace(report, note="; ".join(note for note in (report.note, spelled) if note))
    if kind == "pairs":
        return usable, report
    return [side for pair in usable for side in pair.sides], report


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as no other of the paths ends with."""
    names, different, ends = [], set(paths), dict[int, Counter[tuple[str, ...]]]()
    for path in paths:
        for num in range(1, len(path.parts) + 1):
            if num not in ends:
                ends[num] = Counter(one.parts[-num:] for one in different)
            if ends[num][path.parts[-num:]] == 1:
                break
        names.append(str(Path(*path.parts[-num:])))
    return names


def _tokenize_rows(
    rows: Sequence[ExampleRow],
    tokenizer: ChatTokenizer,
    *,
    path: Path,
    kind: Kind,
    image_encoder: PromptImages | None,
) -> list[Pair]:
    """Tokenise rows. Return their pairs; for a chat one for each of its sequences, with the same
    index."""
    sides = _sides(rows)
    marked = _mark_sides(rows, sides, tokenizer, path=path, kind=kind)
    made = tokenize_marked(tokenizer, [text for texts in marked for text in texts])
    whose = [side for side, texts in zip(sides, marked, strict=True) for _ in texts]
    lines = iter(
        [
            _with_images(line, side, image_encoder, path=path)
            for line, side in zip(made, whose, strict=True)
        ]
    )
    if kind == "chats":
        return [
            Pair(index=row.index, chosen=next(lines), rejected=None, margin=row.margin)
            for row, texts in zip(rows, marked, strict=True)
            for _ in texts
        ]
    return [
        Pair(
            index=row.index,
            chosen=next(lines) if row.chosen is not None else None,
            rejected=next(lines) if row.rejected is not None else None,
            margin=row.margin,
        )
        for row in rows
    ]


def _with_images(
    trajectory: Trajectory, side: Chat, image_encoder: PromptImages | None, *, path: Path
) -> Trajectory:
    """Return a trajectory with its image tokens expanded. Raises DataError if an image has changed
    since the row was read, or if image tokens and images do not match."""
    if image_encoder is None or (
        not side.images and image_encoder.token_id not in trajectory.token_ids
    ):
        return trajectory
    try:
        images = [image_encoder.read(source, base=path.parent) for source in side.images]
        return with_image_tokens(trajectory, images, image_encoder)
    except ValueError as error:
        raise DataError(
            f"the images of a row of {path} cannot be used",
            why=str(error),
            fix="--set data.chat_template=auto   # the model's own template marks each image",
        ) from error


def read_examples(
    file: DataFile,
    *,
    data: Data,
    key: RowField,
    kind: Kind,
    folder: Path | None,
    images: PromptImages | None = None,
) -> FileRows:
    """Read one file that `data.<key>` names. `images`: how the model sees them. Bad rows raise
    nothing here. Raises DataError if the file is missing, empty, or of another kind."""
    path = Path(file.name)
    check_file(path, field=key)
    image_encoder = images and replace(images, fetches=data.remote_images)
    form = ExampleRowParser(field=key, kind=kind, data=data, images=image_encoder)
    rows = read_file(Table(path), file, form, folder=folder)
    rows.require_rows()
    return rows


def _sides(rows: Sequence[ExampleRow]) -> list[Chat]:
    return [side for row in rows for side in (row.chosen, row.rejected) if side is not None]


def _special_token_in_text(
    rows: Sequence[ExampleRow], tokenizer: ChatTokenizer, *, path: Path
) -> str:
    """Return the first special token in a text of a role other than the assistant, and its row, as
    words; empty if there is none."""
    for row in rows[:NUM_CHECKED_ROWS]:
        for side in _sides([row]):
            other_turns = [turn for turn in side.turns if turn["role"] != "assistant"]
            if found := sorted(tokenizer.special_texts_in(other_turns)):
                return (
                    f"row {row.index + 1} of {path} contains the text `{found[0]}`, which the "
                    "model reads as a special token: text of users can open or end a turn there"
                )
    return ""


def _mark_sides(
    rows: Sequence[ExampleRow],
    sides: Sequence[Chat],
    tokenizer: ChatTokenizer,
    *,
    path: Path,
    kind: Kind,
) -> list[list[MarkedText]]:
    """Return the marked texts of each side: one, except for chats that need several."""
    marked: list[list[MarkedText]] = []
    bad: list[BadRow] = []
    lines = [row.index + 1 for row in rows for side in (row.chosen, row.rejected) if side]
    for line, side in zip(lines, sides, strict=True):
        try:
            marked.append(_texts_of(side, tokenizer, kind=kind))
            if not any(text.spans for text in marked[-1]):
                raise ValueError("nothing in it can be learned: its last turn has no text")
        except Exception as error:  # a chat template may raise anything
            named = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            bad.append(BadRow(line=line, reason=f"{named}{error}"))
    if bad:
        raise bad_rows_error(f"{len(bad)} of {len(rows)} rows of {path} cannot be used", path, bad)
    return marked


def _texts_of(chat: Chat, tokenizer: ChatTokenizer, *, kind: Kind) -> list[MarkedText]:
    turns = as_parts(chat.turns) if chat.images else chat.turns
    if not turns:
        return [mark_text(chat.text)]
    if tokenizer.template is None:
        if chat.first + 1 != len(turns) and len(turns) > 2 + (turns[0]["role"] == "system"):
            raise ValueError("a chat of several turns needs a chat template (data.chat_template)")
        require_no_stop(tokenizer, turns, first=len(turns) - 1)
        return [mark_response(tokenizer.render(turns[:-1]), turns[-1]["content"])]
    tools = chat.tools or None
    if kind == "pairs":
        return [mark_chat_as_one(tokenizer, turns, first=chat.first, tools=tools)]
    return mark_chat(tokenizer, turns, first=chat.first, tools=tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleReport:
    """Describes the rows of the files, for the manifest and for people."""

    path: str
    sha256: str
    """SHA-256 of the file's bytes."""
    num_rows: int
    """Rows in the file."""
    num_used: int
    """Number of rows of which at least a part is trained on."""
    num_sequences: int
    """Sequences made from them: a chat may take several (`mark_chat`)."""
    num_too_long: int
    """Sequences left out because they are longer than `data.max_row_tokens`."""
    num_cut: int
    """Sequences truncated to that length."""
    num_equal: int
    """Pairs left out whose sides are equal."""
    tokens: int
    """Number of tokens of all rows that are used."""
    loss_tokens: int
    """Number of these tokens that are trained on."""
    tokens_p50: int
    """Median number of tokens over all sequences; a pair counts by its longer side."""
    tokens_p90: int
    tokens_p99: int
    tokens_max: int
    first: tuple[str, ...] = ()
    """Rows of the first trained sequences: `line 3`."""
    note: str = ""
    """Which rows were left out, and which became several sequences, the first of them by line."""


def select_usable(
    pairs: Sequence[Pair],
    *,
    data: Data,
    key: RowField,
    places: Sequence[Place],
    path: str,
    sha256: str,
) -> tuple[list[Pair], ExampleReport]:
    """Return the rows to train on, and the report on all rows. `places`: the row of each sequence;
    `path`: the files, for messages. Raises DataError if no row is left, or if the recipe refuses
    rows that are too long."""
    bound = data.max_row_tokens
    lengths = [pair.num_tokens for pair in pairs]
    long = {at: f"{n} tokens" for at, n in enumerate(lengths) if n > bound}
    if long and data.long_rows == "error":
        raise _too_long(path, long, lengths, bound, places)
    num_cut, now = 0, list(pairs)
    if data.long_rows == "truncate":
        now = [_cut(pair, bound) for pair in pairs]
        nothing = f"nothing learned in its first {bound} tokens"
        useless = {at: nothing for at in long if not _has_loss_tokens(now[at])}
        num_cut, long = len(long) - len(useless), useless
    equal = {
        at: "both sides are equal"
        for at, pair in enumerate(now)
        if at not in long and _is_equal(pair)
    }
    out = {**long, **equal}
    usable = [pair for at, pair in enumerate(now) if at not in out]
    if not usable:
        if long:
            raise _too_long(path, long, lengths, bound, places)
        raise DataError(
            f"no row of {path} can be learned from",
            why=_format_reasons(equal, places),
            fix=f"--set data.{key}=FILE   # with pairs whose sides differ",
        )
    sides = [side for pair in usable for side in pair.sides]
    ascending = sorted(lengths)
    return usable, ExampleReport(
        path=path,
        sha256=sha256,
        num_rows=len(set(places)),
        num_used=len({places[at] for at in range(len(now)) if at not in out}),
        num_sequences=len(usable),
        num_too_long=len(long),
        num_cut=num_cut,
        num_equal=len(equal),
        tokens=sum(side.num_tokens for side in sides),
        loss_tokens=sum(side.num_loss_tokens for side in sides),
        **percentiles(ascending, "tokens"),
        first=tuple(
            [place.text for at, place in enumerate(places) if at not in out][:NUM_BAD_ROWS_SHOWN]
        ),
        note="; ".join(_notes(path, key, out, places)),
    )


def _cut(pair: Pair, bound: int) -> Pair:
    return replace(
        pair,
        chosen=pair.chosen and truncated(pair.chosen, bound),
        rejected=pair.rejected and truncated(pair.rejected, bound),
    )


def _has_loss_tokens(pair: Pair) -> bool:
    return all(side.num_loss_tokens for side in pair.sides)


def _is_equal(pair: Pair) -> bool:
    return (
        pair.chosen is not None
        and pair.rejected is not None
        and pair.chosen.token_ids == pair.rejected.token_ids
    )


def _notes(path: str, key: RowField, out: Reasons, places: Sequence[Place]) -> Iterator[str]:
    """Yield messages about rows that are left out, and about those that became several
    sequences."""
    counts = Counter(places)
    of = f"of {len(counts)} rows of {path.rpartition('/')[2]}"
    if out:
        left = len({places[at] for at in out})
        yield f"data.{key}: {left} {of} are left out ({_format_reasons(out, places)})"
    if several := [place for place in counts if counts[place] > 1]:
        yield (
            f"data.{key}: {len(several)} {of} are learned in several sequences, {len(places)} in "
            "all: the chat template writes earlier turns otherwise once the chat goes on "
            f"({several[0].text}: {counts[several[0]]})"
        )


def _format_reasons(reasons: Reasons, places: Sequence[Place]) -> str:
    """Return the first few reasons as text, one for each row."""
    by_row: dict[Place, str] = {}
    for at in sorted(reasons):
        by_row.setdefault(places[at], reasons[at])
    texts = [f"{place.text}: {why}" for place, why in by_row.items()]
    return format_few(texts, NUM_BAD_ROWS_SHOWN, joint="; ")


def _too_long(
    path: str, long: Reasons, lengths: Sequence[int], bound: int, places: Sequence[Place]
) -> DataError:
    return DataError(
        f"{len({places[at] for at in long})} of {len({*places})} rows of {path} are longer than "
        f"{bound} tokens",
        why=f"{_format_reasons(long, places)}; the longest has {max(lengths)}",
        fix=[f"--set data.max_row_tokens={max(lengths)}", "--set data.long_rows=truncate"],
    )
