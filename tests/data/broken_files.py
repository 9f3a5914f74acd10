"""Data files that are broken in all the ways that people's are: each is written to a folder, with
what its refusal must say. Used by test_broken_files.py."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

GOOD = b'{"prompt": "2 + 2?", "label": "4"}\n'


def _jsonl(*lines: bytes) -> bytes:
    """A good line, then these."""
    return GOOD + b"\n".join(lines) + b"\n"


def _zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("train.jsonl", GOOD)
    return made.getvalue()


def _parquet(rows: list[dict[str, object]]) -> bytes:
    made = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), made)
    return made.getvalue()


def _arrow(rows: list[dict[str, object]]) -> bytes:
    made = io.BytesIO()
    feather.write_feather(pa.Table.from_pylist(rows), made)
    return made.getvalue()


PARQUET = _parquet([{"prompt": "a", "label": "1"}] * 50)
ARROW = _arrow([{"prompt": "a", "label": "1"}] * 50)

CONTENTS: dict[str, tuple[str, bytes, str]] = {
    "cut off in the middle of a row": ("a.jsonl", _jsonl(GOOD[:20]), r"line 2: not JSON"),
    "two objects on a line": ("a.jsonl", _jsonl(GOOD[:-1] * 2), r"line 2: not JSON \(Extra data"),
    "an array over the whole file": ("a.jsonl", b"[" + GOOD + b"]", r"line 1: not JSON"),
    "an array on one line": ("a.jsonl", b"[" + GOOD[:-1] + b"]", r"line 1: .*not a list"),
    "indented JSON": ("a.jsonl", json.dumps({"a": 1}, indent=2).encode(), r"line 1: not JSON"),
    "an empty line in the middle": ("a.jsonl", _jsonl(b"", GOOD), r"line 2: an empty line"),
    "nothing": ("a.jsonl", b"", r"is empty"),
    "blank lines alone": ("a.jsonl", b" \n\r\n\t\n", r"is empty"),
    "a byte order mark alone": ("a.jsonl", b"\xef\xbb\xbf", r"is empty"),
    "NUL bytes": ("a.jsonl", _jsonl(b"\0" * 100), r"line 2: not JSON \(a NUL byte, byte 1"),
    "UTF-16": ("a.jsonl", GOOD.decode().encode("utf-16"), r"is not JSONL .*UTF-16"),
    "Latin-1": ("a.jsonl", _jsonl(b'{"prompt": "\xe9"}'), r"line 2: not UTF-8 \(byte 13"),
    "a later byte order mark": ("a.jsonl", _jsonl(b"\xef\xbb\xbf" + GOOD), r"line 2: not JSON"),
    "half of a surrogate pair": (
        "a.jsonl",
        _jsonl(b'{"prompt": "\\ud83d", "label": "1"}'),
        r"line 2: `prompt` contains half of a surrogate pair",
    ),
    "NaN as a label": ("a.jsonl", _jsonl(b'{"prompt": "a", "label": NaN}'), r"line 2: .*is nan"),
    "infinity": ("a.jsonl", _jsonl(b'{"prompt": "a", "label": -Infinity}'), r"line 2: .*is -inf"),
    "a number of 5000 digits": (
        "a.jsonl",
        _jsonl(b'{"prompt": "a", "label": %s}' % (b"1" * 5000)),
        r"line 2: not JSON \(Exceeds",
    ),
    "a column that is there twice": (
        "a.jsonl",
        _jsonl(b'{"prompt": "a", "label": "1", "prompt": "b"}'),
        r"line 2: `prompt` is there twice",
    ),
    "nested without end": ("a.jsonl", _jsonl(b'{"a":' * 99_999), r"line 2: JSON nested too deep"),
    "a line of 20 MB": (
        "a.jsonl",
        _jsonl(b'{"prompt": "%s", "label": "1"}' % (b"x" * 20_000_000), GOOD),
        r"1 of 3 rows .*line 2: longer than 16 MiB",
    ),
    "another type in a row": (
        "a.jsonl",
        _jsonl(b'{"prompt": {"text": "a"}, "label": "1"}'),
        r"line 2: `prompt` must be text or a list of messages, not an object",
    ),
    "a label that is a list": (
        "a.jsonl",
        _jsonl(b'{"prompt": "a", "label": ["1", "2"]}'),
        r"line 2: `label` must be text or a number, not a list",
    ),
    "messages without a role": (
        "a.jsonl",
        _jsonl(b'{"prompt": [{"content": "a"}], "label": "1"}'),
        r"line 2: `prompt\[0\]` has no `role`",
    ),
    "other columns in a later row": (
        "a.jsonl",
        _jsonl(b'{"question": "a", "answer": "1"}'),
        r"line 2: `prompt` is missing",
    ),
    "no column of ours": ("a.jsonl", b'{"frage": "a"}\n', r"has no prompt column"),
    "two columns that could be meant": (
        "a.jsonl",
        b'{"prompt": "a", "question": "b", "label": "1"}\n',
        r"the column `question` .* would be ignored.*--set data.prompt_key=question",
    ),
    "gzip": ("a.jsonl", gzip.compress(GOOD), r"is compressed .*gunzip"),
    "gzip by its name": ("a.jsonl.gz", gzip.compress(GOOD), r"is compressed .*gunzip"),
    "zip": ("a.jsonl", _zip(), r"is compressed .*unzip"),
    "bzip2": ("a.jsonl", bz2.compress(GOOD), r"is compressed .*bunzip2"),
    "xz": ("a.jsonl", lzma.compress(GOOD), r"is compressed .*unxz"),
    "parquet under another name": ("a.jsonl", PARQUET, r"is a parquet file"),
    "arrow under another name": ("a.csv", ARROW, r"is not CSV .*is an arrow file"),
    "JSONL as parquet": ("a.parquet", GOOD * 9, r"not a parquet file"),
    "parquet cut off": ("a.parquet", PARQUET[:-40], r"cannot read .*not a parquet file"),
    "parquet spoilt inside": (
        "a.parquet",
        PARQUET[:8] + b"\xff" * 60 + PARQUET[68:],
        r"cannot read .*not a parquet file",
    ),
    "parquet of nothing": ("a.parquet", b"", r"not a parquet file"),
    "parquet with a gap": (
        "a.parquet",
        _parquet([{"prompt": "a", "label": "1"}, {"prompt": "b", "label": None}]),
        r"row 2: `label` is null",
    ),
    "parquet with a gap inside of a message": (
        "a.parquet",
        _parquet(
            [
                {"messages": [{"role": "user", "content": "a"}], "label": "1"},
                {"messages": [{"role": "user", "content": None}], "label": "1"},
                {"messages": [None], "label": "1"},
            ]
        ),
        r"2 of 3 rows .*row 2: `messages\[0\]`.content is empty.*row 3: .* a message",
    ),
    "parquet of bytes": (
        "a.parquet",
        _parquet([{"prompt": b"a", "label": "1"}]),
        r"row 1: `prompt` must be text or a list of messages, not binary",
    ),
    "arrow cut off": ("a.arrow", ARROW[: len(ARROW) // 2], r"not an arrow file"),
    "arrow of nothing": ("a.arrow", b"", r"not an arrow file"),
    "CSV with a field too few": ("a.csv", b"prompt,label\na,1\nb\n", r"line 3: it has 1 fields"),
    "CSV with a field too many": ("a.csv", b"prompt,label\na,1,2\n", r"line 2: it has 3 fields"),
    "CSV with an open quote": ("a.csv", b'prompt,label\na,1\n"b,2\nc,3\n', r"line 3: not CSV"),
    "CSV with a stray quote": ("a.csv", b'prompt,label\n"a"b,1\n', r"line 2: not CSV"),
    "CSV with a bad byte": (
        "a.csv",
        b"prompt,label\na,1\n\xff,2\n",
        r"line 3: it is not UTF-8 \(byte 1",
    ),
    "CSV with an empty label": ("a.csv", b"prompt,label\na,\n", r"line 2: `label` is empty"),
    "CSV without a header's name": ("a.csv", b"prompt,\na,1\n", r"header .*a column has no name"),
    "CSV with a name twice": ("a.csv", b"label,label\n1,2\n", r"two columns are called label"),
    "CSV of a header alone": ("a.csv", b"prompt,label\n", r"is empty"),
    "CSV of an old Mac": ("a.csv", b"prompt,label\ra,1\rb,2", r"header .*new-line character"),
    "JSON": ("a.json", b"[]", r"neither .*jsonl.* jq -c"),
    "no suffix": ("train", GOOD, r"its suffix is missing"),
}
"""What is wrong -> name, content, what its refusal says."""


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "a.jsonl").write_bytes(GOOD)


def _unix_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has a bound that pytest's folders pass
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(path: Path) -> None:
    """100 MB of NUL bytes that are nowhere on the disk."""
    with path.open("wb") as file:
        file.seek(100_000_000)
        file.write(struct.pack("B", 0))


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (_folder, r"is a folder .*a\.jsonl"),
    "a named pipe": (os.mkfifo, r"is a named pipe"),
    "a socket": (_unix_socket, r"is a socket"),
    "/dev/zero": (lambda path: path.symlink_to("/dev/zero"), r"is a device file"),
    "a broken link": (lambda path: path.symlink_to("gone.jsonl"), r"a symbolic link to gone.jsonl"),
    "a link to itself": (lambda path: path.symlink_to(path.name), r"cannot open|symbolic link"),
    "absent": (lambda path: None, r"there is no file"),
    "a hole of 100 MB": (_sparse, r"line 1: longer than 16 MiB"),
}
"""What is wrong -> what makes it at a path `a.jsonl`, and what its refusal says."""
