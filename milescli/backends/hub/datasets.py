"""Data sets from the hub: finds the files of one split, by the data set's card or by their names,
downloads them, and joins them to one file. Never runs code of a data set."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import yaml

from milescli.backends.hub.fetch import (
    Choose,
    Read,
    check_hash,
    chosen_files,
    fetch_files,
    missing_files,
)
from milescli.backends.hub.repo import Repo, list_files
from milescli.core.errors import DataError, nearest
from milescli.core.files import parse_yaml
from milescli.recipe.data_files import HubData

if TYPE_CHECKING:
    from milescli.console.output import Output

CARD = "README.md"
COPIED_BYTES = 2**20
JOINED_ROWS = 8192
"""Rows in memory at a time while parts are joined."""
SUFFIXES = (".parquet", ".jsonl", ".arrow", ".csv")
"""Formats that are read, most likely first: a data set in two formats has the same rows in both."""
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "eval": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
"""Words in the names of files -> the split that the hub shows for them."""
DEFAULT = "default"
CONVERTED = "refs/convert/parquet"
"""The branch on which the hub keeps its own parquet copy of data sets in other formats, as
SUBSET/SPLIT/0000.parquet."""

Splits = dict[str, dict[str, list[str]]]
"""Subset -> split -> files."""


def fetch_data(data: HubData, *, key: str, into: Path, output: Output | None = None) -> Path:
    """Return one split as one file, verified by the hub's hashes: the file in the cache, or a file
    in the folder `into` that joins several parts. `key`: prompts, eval, demonstrations.

    Raises DataError, or MachineError if the disk is too small."""
    fetched = fetch_files(
        _repo(data, key=key), _chooser(data, key=key), check=check_hash, output=output
    )
    files = list(fetched.values())
    if len(files) == 1:
        return files[0]
    suffix = files[0].suffix if files[0].suffix == ".parquet" else ".jsonl"
    return join_files(files, into / f"{key}{suffix}", key=key)


def missing_bytes(data: HubData, *, key: str) -> int:
    """Return the number of bytes that `fetch_data` would download now. Raises as it does."""
    repo = _repo(data, key=key)
    listing = list_files(repo)
    chosen = chosen_files(repo, listing, _chooser(data, key=key))
    return sum(listing.files[path].size for path in missing_files(repo, listing, chosen))


def _repo(data: HubData, *, key: str) -> Repo:
    return Repo(
        name=data.name,
        kind="dataset",
        revision=data.revision,
        instead=f"--set data.{key}=/path/to/a/copy",
    )


def _chooser(data: HubData, *, key: str) -> Choose:
    def choose(paths: Sequence[str], read: Read) -> list[str]:
        card = read(CARD).read_text(encoding="utf-8", errors="replace") if CARD in paths else ""
        return choose_files(data, paths, card=card, key=key)

    return choose


def join_files(files: Sequence[Path], into: Path, *, key: str) -> Path:
    """Join the parts of one split to one file of the same format, in order. Returns it unchanged if
    it exists."""
    if into.exists():
        return into
    into.parent.mkdir(parents=True, exist_ok=True)
    part = into.with_suffix(".part")
    if into.suffix == ".parquet":
        _join_parquet(files, part, key=key)
    elif files[0].suffix == ".jsonl":
        _join_lines(files, part)
    else:
        _join_rows(files, part)
    return part.replace(into)


def _join_lines(files: Sequence[Path], into: Path) -> None:
    with into.open("wb") as joined:
        for file in files:
            with file.open("rb") as lines:
                last = b"\n"
                while chunk := lines.read(COPIED_BYTES):
                    joined.write(chunk)
                    last = chunk[-1:]
            if last != b"\n":
                joined.write(b"\n")


def _join_rows(files: Sequence[Path], into: Path) -> None:
    """Join files of formats that cannot be concatenated, as JSONL. An unreadable row becomes an
    unreadable line."""
    import json

    from milescli.data.tables import Table

    with into.open("w", encoding="utf-8") as joined:
        for file in files:
            for _, row in Table(file).records():
                joined.write(json.dumps(row, default=str) + "\n")


def _join_parquet(files: Sequence[Path], into: Path, *, key: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetWriter(into, pq.read_schema(files[0])) as writer:
            for file in files:
                with pq.ParquetFile(file) as part:
                    for batch in part.iter_batches(JOINED_ROWS):
                        writer.write_batch(batch)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{files[0].name} and the {len(files) - 1} other parts of its split cannot be joined",
            why=str(error).splitlines()[0],
            fix=f"--set data.{key}={files[0]}   # only this file",
        ) from error


def choose_files(data: HubData, paths: Iterable[str], *, card: str, key: str) -> list[str]:
    """Return the files of the split, in order. `card`: README.md of the data set, empty if there is
    none.

    Raises DataError if there is nothing to read, and if there are several subsets or splits and
    none was named."""
    readable = sorted(
        path for path in paths if path.endswith(SUFFIXES) and not path.startswith(".")
    )
    if not readable:
        raise DataError(
            f"the data set {data.name} has no .parquet, .jsonl, .arrow or .csv file",
            why="miles does not read other formats, and never runs the code of a data set",
            fix=f"--set data.{key}={replace(data, revision=CONVERTED).spelled()}   # the hub's "
            "own parquet copy, if it has one",
        )
    splits = _declared(card, readable) or _by_name(readable)
    subset = _pick(data.subset, splits, likely=DEFAULT, data=data, key=key, kind="subset")
    split = _pick(
        data.split, splits[subset], likely="train", data=data, key=key, kind="split", subset=subset
    )
    files = splits[subset][split]
    return next(
        same for suffix in SUFFIXES if (same := [path for path in files if path.endswith(suffix)])
    )


def _pick(
    wanted: str | None,
    existing: Mapping[str, object],
    *,
    likely: str,
    data: HubData,
    key: str,
    kind: str,
    subset: str | None = None,
) -> str:
    if wanted in existing:
        return str(wanted)
    if wanted is None and (len(existing) == 1 or likely in existing):
        return likely if likely in existing else next(iter(existing))
    guesses = [guess] if wanted and (guess := nearest(wanted, existing)) else list(existing)[:4]
    spellings = [
        HubData(
            name=data.name,
            revision=data.revision,
            subset=guess if kind == "subset" else None if subset == DEFAULT else subset,
            split=guess if kind == "split" else data.split or "train",
        ).spelled()
        for guess in guesses
    ]
    raise DataError(
        f"choose a {kind} of {data.name}"
        if wanted is None
        else f"{data.name} has no {kind} `{wanted}`",
        why=f"it has {', '.join(existing)}",
        fix=[f"--set data.{key}={spelling}" for spelling in spellings],
    )


def _by_name(paths: Sequence[str]) -> Splits:
    """Find splits by the names of files: `main/train-00000-of-00001.parquet` -> main, train. If no
    file of a subset names a split, all are `train`, as on the hub, and each can be named, too:
    `aime-2024.jsonl` -> default, aime-2024."""
    splits: Splits = {}
    for path in paths:
        *folders, stem = PurePosixPath(path).with_suffix("").parts
        stem = re.sub(r"-\d+-of-\d+$", "", stem)
        words = [
            SPLIT_WORDS.get(word)
            for part in (stem, *reversed(folders))
            for word in re.split(r"[^a-z]+", part.lower())
        ]
        split = next((word for word in words if word), stem)
        subset = (
            folders[0]
            if folders and folders[0] != "data" and folders[0] not in SPLIT_WORDS
            else DEFAULT
        )
        splits.setdefault(subset, {}).setdefault(split, []).append(path)
    for named in splits.values():
        if not any(name in SPLIT_WORDS.values() for name in named):
            named["train"] = [path for files in named.values() for path in files]
    return splits


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return True if the parts of a path match those of a pattern of the hub: `*` stays within a
    part, and `**` stands for any number of folders."""
    if not pattern:
        return not names
    first, *rest = pattern
    if first == "**" and _matches(names, rest):
        return True
    if not names or not fnmatch.fnmatchcase(names[0], first):
        return False
    return _matches(names[1:], pattern if first == "**" else rest)


def _declared(card: str, paths: Sequence[str]) -> Splits:
    """Return the splits that the card's `configs` declare; empty if no file matches them."""
    splits: Splits = {}
    configs = _front_matter(card).get("configs")
    for config in configs if isinstance(configs, list) else []:
        if not isinstance(config, dict):
            continue
        subset = (
            DEFAULT
            if config.get("default") is True and len(configs) == 1
            else str(config.get("config_name", DEFAULT))
        )
        for split, patterns in _patterns(config.get("data_files")):
            wanted = [pattern.split("/") for pattern in patterns]
            files = [
                path for path in paths if any(_matches(path.split("/"), one) for one in wanted)
            ]
            if files:
                splits.setdefault(subset, {}).setdefault(split, []).extend(files)
    return splits


def _patterns(data_files: object) -> list[tuple[str, list[str]]]:
    if isinstance(data_files, str):
        return [("train", [data_files])]
    if not isinstance(data_files, list):
        return []
    plain = [item for item in data_files if isinstance(item, str)]
    split = [
        (str(item.get("split", "train")), _texts(item.get("path")))
        for item in data_files
        if isinstance(item, dict)
    ]
    return [*([("train", plain)] if plain else []), *split]


def _texts(value: object) -> list[str]:
    return (
        [value]
        if isinstance(value, str)
        else [str(item) for item in value]
        if isinstance(value, list)
        else []
    )


def _front_matter(card: str) -> dict[str, object]:
    match = re.match(r"\A\ufeff?---\r?\n(.*?)\r?\n---", card, re.DOTALL)
    try:
        read = parse_yaml(match[1]) if match else None
    except yaml.YAMLError:
        return {}  # a spoilt card says nothing; the names of the files are still there
    return read if isinstance(read, dict) else {}
