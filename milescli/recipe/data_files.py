"""Parses how a recipe names data files: `train.jsonl`, `train.jsonl[0:1000]`,
`hf:NAME[@REVISION][:SUBSET][:SPLIT]`, `task:NAME`, or a list of these. Opens and fetches
nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from milescli.core.errors import RecipeError

if TYPE_CHECKING:
    from milescli.recipe.data import Data


HUB_PREFIX = "hf:"
TASK_PREFIX = "task:"
_SPELLING = re.compile(
    r"hf:(?P<name>[\w-][\w.-]*(/[\w-][\w.-]*)?)(@(?P<revision>[\w./-]+))?"
    r"(:(?P<first>[\w.-]+))?(:(?P<second>[\w.-]+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubData:
    """One split of one data set."""

    name: str
    """Name on the hub: `openai/gsm8k`."""
    revision: str | None
    """Branch, tag or commit; None: the default branch."""
    subset: str | None
    """`config_name` on the data set's card; None: the only one, or the default."""
    split: str | None
    """Name of the split; None: the only one, or `train`."""

    def spelled(self) -> str:
        """Return the spelling in a recipe."""
        revision = f"@{self.revision}" if self.revision else ""
        tail = (
            f":{self.subset}:{self.split or 'train'}"
            if self.subset
            else f":{self.split}"
            if self.split
            else ""
        )
        return f"{HUB_PREFIX}{self.name}{revision}{tail}"


def is_hub(value: str) -> bool:
    """Return True if a value of `data.*` refers to the hub."""
    return value.startswith(HUB_PREFIX)


def parse_hub(value: str, *, key: str) -> HubData:
    """Parse `hf:openai/gsm8k:main:train`; a single part after the name is the split. `key` is the
    recipe's key, for RecipeError."""
    match = _SPELLING.fullmatch(value)
    if match is None:
        raise RecipeError(
            f"`{key}` cannot be `{value}`",
            why="a data set of the hub is written as hf:NAME, hf:NAME:SPLIT or "
            "hf:NAME:SUBSET:SPLIT, with an optional @REVISION after the name",
            fix=f"--set {key}=hf:openai/gsm8k:main:train",
        )
    first, second = match["first"], match["second"]
    return HubData(
        name=match["name"],
        revision=match["revision"],
        subset=first if second else None,
        split=second or first,
    )


FIELDS = ("prompts", "eval", "demonstrations", "train", "validation")
"""The keys in `data` that name files."""
DataField = Literal["prompts", "eval", "demonstrations", "train", "validation"]
_SLICE = re.compile(r"(?P<name>.+)\[(?P<rows>[^\[\]]*)\]")
_ROWS = re.compile(r"(?P<start>\d{0,15}):(?P<stop>\d{0,15})")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file, data set or task, and the range of its rows."""

    name: str
    start: int = 0
    """First row, counted from 0."""
    stop: int | None = None
    """Row before which to stop; None: read all."""

    @property
    def rows(self) -> str:
        """Return `[0:1000]`; empty if all rows are meant."""
        if not self.start and self.stop is None:
            return ""
        return f"[{self.start}:{'' if self.stop is None else self.stop}]"

    def spelled(self) -> str:
        """Return the spelling in a recipe."""
        return self.name + self.rows


def names_in(value: str | list[str] | None) -> list[str]:
    """Return the names in a key of `data` that takes one or several."""
    return [] if value is None else [value] if isinstance(value, str) else value


def files_of(data: Data, field: DataField) -> list[DataFile]:
    """Return all files that one key names, in order; for prompts, also those of a mix."""
    mixed = [source.path for source in data.mix or [] if field == "prompts"]
    return [
        parse_data_file(name, key=f"data.{field}")
        for value in (getattr(data, field), *mixed)
        for name in names_in(value)
    ]


def parse_data_file(text: str, *, key: str) -> DataFile:
    """Parse `train.jsonl[0:1000]`. `key` is the recipe's key, for RecipeError."""
    match = _SLICE.fullmatch(text)
    if match is None:
        return DataFile(name=text)
    rows = _ROWS.fullmatch(match["rows"])
    start = int(rows["start"] or 0) if rows else 0
    stop = int(rows["stop"]) if rows and rows["stop"] else None
    if rows is None or (stop is not None and stop <= start):
        raise RecipeError(
            f"`{key}` cannot be `{text}`",
            why="rows are written as [START:STOP], counted from 0 and without STOP: [0:1000] is "
            "the first thousand, [1000:] is the rest",
            fix=f"--set '{key}={match['name']}[0:1000]'",
        )
    return DataFile(name=match["name"], start=start, stop=stop)


def check_names(value: str | list[str] | None, *, key: str) -> None:
    """Raise RecipeError if a name is invalid."""
    if value is not None and not all(name.strip() for name in names_in(value) or [""]):
        raise RecipeError(
            f"`{key}` does not name a file",
            why="the list is empty" if not value else "the list contains an empty name",
            fix=f"--set {key}=FILE.jsonl",
        )
    for text in names_in(value):
        file = parse_data_file(text, key=key)
        if is_hub(file.name):
            parse_hub(file.name, key=key)
        if file.name == "task:":
            raise RecipeError(
                f"`{key}` does not name a task",
                why="`task:` must be followed by a name",
                fix=f"--set {key}=task:sums",
            )
