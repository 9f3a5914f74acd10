"""Which files of a data set on the hub are one split of it: by its card where that says so, else by
their names. Pure; no code of theirs is run. Called by `datasets`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import yaml

from milescli.core.errors import DataError, nearest
from milescli.recipe.data_files import HubData

SUFFIXES = (".parquet", ".jsonl", ".arrow", ".csv")
"""What is read, the likelier first: a data set that has both means the same rows."""
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


def choose_files(data: HubData, paths: Iterable[str], *, card: str, key: str) -> list[str]:
    """The files of the split, in order. `card`: README.md of the data set, empty without one.

    Raises DataError where there is nothing to read, and where several subsets or splits are there
    and none was named.
    """
    readable = sorted(
        path for path in paths if path.endswith(SUFFIXES) and not path.startswith(".")
    )
    if not readable:
        raise DataError(
            f"the data set {data.name} has no .parquet, .jsonl, .arrow or .csv file",
            why="no other format is read, and no code of a data set is run",
            fix=f"--set data.{key}={replace(data, revision=CONVERTED).spelled()}   # the hub's own "
            "parquet copy, where it has one",
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
        f"which {kind} of {data.name}?"
        if wanted is None
        else f"{data.name} has no {kind} `{wanted}`",
        why=f"it has {', '.join(existing)}",
        fix=[f"--set data.{key}={spelling}" for spelling in spellings],
    )


def _by_name(paths: Sequence[str]) -> Splits:
    """`main/train-00000-of-00001.parquet` -> main, train; `aime-2024.jsonl` -> default,
    aime-2024."""
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
    return splits


def _declared(card: str, paths: Sequence[str]) -> Splits:
    """What the card's `configs` say; empty where it says nothing that files of ours answer to."""
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
            files = [
                path
                for path in paths
                if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
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
        read = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}  # a spoilt card says nothing; the names of the files are still there
    return read if isinstance(read, dict) else {}
