"""An upload that is cut short is no copy, and the next one completes it; what is fetched is what
was written. On a store of files, which stands for any."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.backends.stores.copies import RECORD, fetch, read_record, upload, upload_one
from milescli.backends.stores.store import ObjectStore, StoreError
from milescli.core.errors import CheckpointError

LAST = "config.json"


class Counting(ObjectStore):
    """Notes what is put, and fails at the object `cut`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"file://{folder}", instead="--to DIR")
        self.put_names: list[str] = []
        self.cut: str | None = None

    def put(self, file: Path, name: str, **options) -> None:
        if name.rpartition("/")[2] == self.cut:
            raise StoreError("cut", why="a kill", fix="again")
        self.put_names.append(name)
        super().put(file, name, **options)


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "store")


def files_in(folder: Path, **texts: str) -> dict[str, Path]:
    folder.mkdir(exist_ok=True)
    names = {LAST: "{}", "a.bin": "a" * 100, "sub/b.bin": "b" * 50, **texts}
    for name, text in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return {name: folder / name for name in names}


def test_the_last_object_is_written_last_and_only_what_is_missing_is_sent_again(
    store: Counting, tmp_path: Path
) -> None:
    files = files_in(tmp_path / "one")
    store.cut = "b.bin"
    with pytest.raises(StoreError):
        upload(store, files, sha256={}, last=LAST, below="x")
    assert LAST not in store.sizes("x") and "a.bin" in store.sizes("x")
    store.cut, store.put_names = None, []
    told: list[int] = []
    assert upload(store, files, sha256={}, last=LAST, below="x", progress=told.append) == 52
    assert store.put_names == ["x/sub/b.bin", f"x/{LAST}"] and sum(told) == 152
    store.put_names = []
    assert upload(store, files, sha256={}, last=LAST, below="x") == 0 and not store.put_names


def test_another_copy_in_its_place_is_incomplete_until_all_of_it_is_there(
    store: Counting, tmp_path: Path
) -> None:
    upload(store, files_in(tmp_path / "one", old="o"), sha256={}, last=LAST, below="x")
    store.cut = "b.bin"
    other = files_in(tmp_path / "two", **{LAST: "{ }", "a.bin": "A" * 100, "sub/b.bin": "B" * 50})
    with pytest.raises(StoreError):
        upload(store, other, sha256={}, last=LAST, below="x")
    assert store.sizes("x").keys() == {RECORD, "a.bin"}
    store.cut = None
    upload(store, other, sha256={}, last=LAST, below="x")
    assert store.read("x/sub/b.bin") == b"B" * 50 and "old" not in store.sizes("x")


def _fetched(store: ObjectStore, into: Path) -> list[int]:
    told: list[int] = []
    record = read_record(store, "x")
    fetch(store, record, below="x", into=lambda name: into / name, progress=told.append)
    return told


def test_a_fetched_copy_is_what_was_written(store: Counting, tmp_path: Path) -> None:
    files = files_in(tmp_path / "one")
    upload(store, files, sha256={}, last=LAST, below="x")
    assert sum(_fetched(store, tmp_path / "got")) == 152
    assert (tmp_path / "got/sub/b.bin").read_text() == "b" * 50
    (tmp_path / "store/x/a.bin").unlink()  # what is there already is not fetched again
    assert sum(_fetched(store, tmp_path / "got")) == 152


@pytest.mark.parametrize(
    ("content", "why"), [("a" * 99, "but has 99"), ("A" * 100, "its SHA-256"), (None, "is missing")]
)
def test_a_truncated_a_swapped_and_a_missing_object_are_named(
    content: str | None, why: str, store: Counting, tmp_path: Path
) -> None:
    upload(store, files_in(tmp_path / "one"), sha256={}, last=LAST, below="x")
    changed = tmp_path / "store/x/a.bin"
    changed.unlink() if content is None else changed.write_text(content)
    with pytest.raises(CheckpointError, match=r"x/a\.bin is damaged") as caught:
        _fetched(store, tmp_path / "got")
    assert why in caught.value.why and not (tmp_path / "got/a.bin").exists()


@pytest.mark.parametrize(
    "record",
    [
        "[]",
        "{",
        '{"../../out": {"size_bytes": 1, "sha256": "0"}}',
        '{"/etc/out": {"size_bytes": 1, "sha256": "0"}}',
        '{"a": {"size_bytes": "1", "sha256": "0"}}',
        '{"a": {"size_bytes": 1}}',
    ],
)
def test_a_record_that_names_other_places_or_is_none_is_refused(
    record: str, store: Counting
) -> None:
    store.write(f"x/{RECORD}", record.encode())
    with pytest.raises(CheckpointError, match="is damaged"):
        read_record(store, "x")


def test_files_that_are_sent_one_by_one_are_part_of_the_copy(
    store: Counting, tmp_path: Path
) -> None:
    files = files_in(tmp_path / "one")
    first = files.pop("a.bin")
    sent = {"a.bin": upload_one(store, first, "a.bin", below="x")}
    assert read_record(store, "x") == sent and LAST not in store.sizes("x")
    store.put_names = []
    assert upload_one(store, first, "a.bin", below="x") == sent["a.bin"], "an upload again"
    assert not store.put_names, "it is there"
    upload(store, files, sha256={}, last=LAST, below="x", already=sent)
    assert store.put_names == ["x/sub/b.bin", f"x/{LAST}"]
    assert read_record(store, "x").keys() == {"a.bin", *files}
    first.write_text("c" * 100)
    other = upload_one(store, first, "a.bin", below="x")
    assert store.read("x/a.bin") == b"c" * 100 and other != sent["a.bin"]
    with pytest.raises(CheckpointError, match="was lost while others"):
        upload(store, files, sha256={}, last=LAST, below="x", already=sent)
