"""Data sets from the hub: one split as one file. Runs no code of theirs; called by runs and the
doctor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.hub.fetch import (
    Choose,
    Read,
    check_hash,
    chosen_files,
    fetch_files,
    missing_files,
)
from milescli.backends.hub.repo import Repo, list_files
from milescli.backends.hub.splits import choose_files
from milescli.core.errors import DataError
from milescli.recipe.data_files import HubData

if TYPE_CHECKING:
    from milescli.console.output import Output

CARD = "README.md"
COPIED_BYTES = 2**20
JOINED_ROWS = 8192
"""In memory at once where parts are joined."""


def fetch_data(data: HubData, *, key: str, into: Path, output: Output | None = None) -> Path:
    """One split as one file, with the hashes that the hub lists: where it lies in the cache, or
    joined within the folder `into` where the hub has it in parts. `key`: prompts, eval,
    demonstrations.

    Raises DataError, or MachineError where the disk is too small.
    """
    fetched = fetch_files(
        _repo(data, key=key), _chooser(data, key=key), check=check_hash, output=output
    )
    files = list(fetched.values())
    if len(files) == 1:
        return files[0]
    suffix = files[0].suffix if files[0].suffix == ".parquet" else ".jsonl"
    return join_files(files, into / f"{key}{suffix}", key=key)


def missing_bytes(data: HubData, *, key: str) -> int:
    """How much `fetch_data` would fetch now; raises as it does."""
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
    """The parts of one split as one file of the same format, in order; as it is where it was made
    before."""
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
    """Of formats that cannot be put behind one another, as JSONL; a row that cannot be read stays
    one."""
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
            fix=f"--set data.{key}={files[0]}   # one of them alone",
        ) from error
